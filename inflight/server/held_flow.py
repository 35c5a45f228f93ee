"""When a connection is read."""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl


class HeldFlow(FlowControl):
    """Reading can be held: then whoever waits for a body does not resume it."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self, resume: bool = True) -> None:
        """Unless it is resumed here, whoever waits for the body does that."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
