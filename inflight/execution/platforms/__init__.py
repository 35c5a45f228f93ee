"""What differs between devices when an engine is put together: one class each, chosen by `platform`."""

from inflight.execution.platforms.platform import Platform, platform

__all__ = ["Platform", "platform"]
