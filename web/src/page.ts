/** One page of the application. Its elements live as long as the application does; `show` and `hide` start and stop its work. */
export interface Page {
  readonly title: string;
  readonly root: HTMLElement;
  show(query: URLSearchParams): void;
  hide(): void;
}

/** Call `work` now and then again and again, with a pause in between, while the page is visible, until `stop` is called. */
export class Polling {
  private timer = 0;

  constructor(private readonly work: () => Promise<void>, private readonly everyMs: number) {}

  start() {
    this.stop();
    const mine = (this.timer = -1 - Math.random());
    const again = async () => {
      if (!document.hidden) await this.work();
      if (this.timer === mine) setTimeout(() => this.timer === mine && void again(), this.everyMs);
    };
    void again();
  }

  stop() {
    this.timer = 0;
  }
}
