"""What is told of engines in processes of their own: how each is watched, and how several of them are routed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import ConfigError
from inflight.option import PYTHON, SCHEDULING, WATCHING, check, option, options_of


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """How an engine in a process of its own is watched."""

    max_restarts: int = option(
        3, SCHEDULING, "Restarts of an engine that died, within ten minutes.", at_least=0
    )
    restart_window: float = option(
        600.0, PYTHON, "Seconds in which max_restarts are allowed.", unit="seconds", above=0, at_most=math.inf
    )
    heartbeat: float = option(
        1.0, PYTHON, "Seconds between two signs of life.", unit="seconds", above=0, at_most=math.inf
    )
    silent_after: float = option(
        15.0,
        PYTHON,
        "Seconds without a sign of life before it is unhealthy.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    stalled_after: float = option(
        60.0,
        PYTHON,
        "Seconds without a step, with work to do, before it is unhealthy.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    kill_silent_after: float | None = option(
        60.0,
        PYTHON,
        "Seconds without a sign of life before it is killed and restarted; None: never.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    kill_stalled_after: float | None = option(
        # Longer than the longest step: thousands of prompt tokens of a large model on a slow CPU take minutes.
        900.0,
        SCHEDULING,
        "Seconds without a step, with work to do, before the engine is killed and restarted.",
        unit="seconds",
        above=0,
        at_most=math.inf,
    )
    log_format: str = option(
        "text", WATCHING, "text, or json: one object per line.", choices=("text", "json")
    )
    environment: Mapping[str, str] = field(
        default_factory=dict
    )  # variables that it has beside those of this one

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Several engines with the same model, each in a process of its own, behind one router."""

    replicas: int | None = option(
        None,
        SCHEDULING,
        "Engines with the same model, between which requests are routed; answers outlive an engine that dies.",
        at_least=1,
        at_most=256,
        unset="one engine, and no router",
    )
    routing: str = option(
        "prefix_aware",
        SCHEDULING,
        "How a replica is chosen: by cached prefixes and load, by load, or in turn.",
        choices=("prefix_aware", "least_loaded", "round_robin"),
    )
    failover_timeout: float = option(
        120.0,
        SCHEDULING,
        "Seconds that answers which have begun wait for a replica when all are gone.",
        at_least=0,
        unit="seconds",
    )

    ray_address: str | None = option(
        None,
        SCHEDULING,
        "Replicas are actors on the machines of this Ray cluster: auto for the one that this machine is part of, or "
        "the address of its head.",
        unset="replicas are processes on this machine",
    )
    ray_num_cpus: float | None = option(
        None, SCHEDULING, "CPUs that a replica asks Ray for.", above=0, unset="one for each rank"
    )
    ray_num_gpus: float | None = option(
        None,
        SCHEDULING,
        "GPUs that a replica asks Ray for; several replicas may share one: 0.5, say.",
        at_least=0,
        unset="one for each rank, where the cluster has GPUs",
    )
    ray_timeout: float = option(
        600.0,
        SCHEDULING,
        "Seconds that a new replica waits for Ray to find room, which may first have to start a machine.",
        at_least=0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.ray_address == "":
            raise ConfigError("ray_address is '': allowed is 'auto', or an address")

    @property
    def is_wanted(self) -> bool:
        """Whether there is a router at all."""
        return self.replicas is not None or self.ray_address is not None

    @property
    def on_this_machine(self) -> bool:
        """Whether engines see the files that this process sees."""
        return self.ray_address is None

    @staticmethod
    def taken_from(options: dict[str, Any]) -> RouterConfig:
        """What of these options, flat names, is the router's; it is not among them any more."""
        names = options_of(RouterConfig)
        return RouterConfig(**{name: options.pop(name) for name in names if name in options})
