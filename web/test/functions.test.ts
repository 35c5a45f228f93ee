import { describe, expect, it } from "vitest";
import { splitBlocks } from "../src/chat/markdown";
import { described, resultOf, TOY_TOOLS } from "../src/chat/toyTools";
import { duration, short } from "../src/format";
import { expand, groupTitle } from "../src/memory";
import { parts, readPages } from "../src/requests";
import { niceTick } from "../src/timeline/page";

describe("splitBlocks", () => {
  it.each<[string, string, string[]]>([
    ["paragraphs", "a\nb\n\nc", ["a\nb", "c"]],
    ["headings without blank lines", "# t\ntext\n## u", ["# t", "text", "## u"]],
    ["code with blank lines", "x\n```py\na\n\nb\n```\ny", ["x", "```py\na\n\nb\n```", "y"]],
    ["code that is not closed yet", "```\na\n\n", ["```\na\n\n"]],
    ["shorter fences inside code", "````\n```\n````", ["````\n```\n````"]],
    ["lists with blank lines", "- a\n\n- b\n\ntext", ["- a\n\n- b\n", "text"]],
    ["rules", "a\n\n---\n\nb", ["a", "---", "b"]],
    ["nothing", "\n\n", []],
  ])("keeps %s apart", (_, text, blocks) => {
    expect(splitBlocks(text)).toEqual(blocks);
  });

  it("changes only the last blocks when a text grows", () => {
    const text = "# A\n\nsome *text*\n\n- a\n- b\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n";
    for (let end = 1; end < text.length; end++) {
      const before = splitBlocks(text.slice(0, end)), after = splitBlocks(text.slice(0, end + 1));
      expect(after.slice(0, Math.max(0, before.length - 2))).toEqual(before.slice(0, Math.max(0, before.length - 2)));
    }
  });
});

describe("toy tools", () => {
  it.each<[string, string, string]>([
    ["calculate", '{"expression": "-2^2 + 10 % 4 * 3"}', "2"],
    ["calculate", '{"expression": "2 ** 3 ** 2 - .5"}', "511.5"],
    ["calculate", '{"expression": "0.1 + 0.2"}', "0.3"],
    ["calculate", '{"expression": "14 / 0"}', "Error: cannot compute 14 / 0"],
    ["calculate", '{"expression": "(1"}', "Error: cannot compute (1"],
    ["get_time", '{"city": "Atlantis"}', "UTC (the time zone of Atlantis is unknown)"],
    ["lookup", '{"query": "How high is the Eiffel Tower?"}', "330 metres"],
    ["lookup", '{"query": "nonsense"}', "Nothing was found about nonsense"],
    ["lookup", "{}", "Error: query is missing"],
    ["lookup", "null", "Error: query is missing"],
    ["lookup", "{broken", "Error: "],
    ["delete", "{}", "Error: there is no tool delete"],
  ])("%s(%s) returns %s", (name, text, expected) => {
    expect(resultOf(name, text)).toContain(expected);
  });

  it("has constant weather, and describes each tool as a function", () => {
    expect(resultOf("get_weather", '{"city": "Rome"}')).toBe(resultOf("get_weather", '{"city": "ROME"}'));
    expect(resultOf("get_time", '{"city": "Oslo"}')).toMatch(/^\d\d:\d\d$/);
    expect(TOY_TOOLS.map(described).map((tool) => tool.function.name)).toEqual(["calculate", "get_weather", "get_time", "lookup"]);
  });
});

describe("the bar of causes", () => {
  it("adds up to the time in the engine and leaves out what took no time", () => {
    const breakdown = { queue: { step: 0.1, memory: 0, slots: 0.2, budget: 0, policy: 0 }, prefill: 1, prefill_of_others: 0.5, decode: 2, preempted: 0, held: 0, lost: 0 };
    const all = parts(breakdown);
    expect(all.map(([kind]) => kind)).toEqual(["queue-step", "queue-slots", "prefill", "decode", "others"]);
    expect(all.reduce((sum, [, , seconds]) => sum + seconds, 0)).toBeCloseTo(3.8);
  });
});

describe("numbers", () => {
  it("are short", () => {
    expect([5, 9.5, 950, 12345, 2_500_000].map(short)).toEqual(["5", "9.5", "950", "12.3k", "2.50M"]);
    expect([12e-6, 0.0034, 0.25, 1.25, 125].map(duration)).toEqual(["12 µs", "3.4 ms", "250 ms", "1.25 s", "2 min 5 s"]);
  });

  it("of the axis are round", () => {
    expect([0.0013, 0.02, 0.03, 7].map(niceTick)).toEqual([0.002, 0.02, 0.05, 10]);
  });

  it("expand to one state per block", () => {
    expect([...expand([[1, 2], [-1, 1], [3, 1]], 5)]).toEqual([1, 1, -1, 3, -1]);
  });
});

describe("groupTitle", () => {
  it.each([["all tokens", "In use, all tokens"], ["window 1024", "In use, window 1024"], ["snapshots", "Cached, snapshots"]])(
    "names the group %s", (name, title) => {
      expect(groupTitle(name)).toBe(title);
    });
});

describe("readPages", () => {
  const lists = [[1, 2], [3, 4], [5]];
  const read = async (before: { data: number[] } | null) => {
    const index = before ? lists.indexOf(before.data) + 1 : 0;
    return { data: lists[index]!, has_more: index + 1 < lists.length };
  };

  it.each([[1, [1, 2]], [2, [1, 2, 3, 4]], [3, [1, 2, 3, 4, 5]], [9, [1, 2, 3, 4, 5]]])("reads at most %i pages", async (most, all) => {
    expect((await readPages(most, read)).flatMap(({ data }) => data)).toEqual(all);
  });
});
