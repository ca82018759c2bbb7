"""One NIXL agent with one plug-in, used by one thread: memory against files, objects, or a peer's memory.

NIXL is refused below 1.5.0, where a short read and a full disk are reported as done. A plug-in counts as usable when
it has been *created*: NIXL lists plug-ins whose libraries are missing. Every value is a transfer of its own, so that
one fault is one value's. Transfers advance only while their state is asked for, which `move` does with growing pauses;
a handle is released, and what it refers to deregistered, only after its transfer has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvtide.kvcache import ConfigError, MissingExtra

OLDEST = (1, 5, 0)
_INFINIBAND = Path("/sys/class/infiniband")
_EAGER_POLLS = 100
_LONGEST_PAUSE = 0.002


class Piece(NamedTuple):
    """A transfer: `length` bytes between local memory at `address` and `place` of device `device`."""

    address: int
    length: int
    place: int
    device: int
    meta: str = ""  # what registering the remote side needs: an object's name


class Agent:
    """One agent; `agent` is NIXL's. `ConfigError` when the plug-in cannot be created."""

    def __init__(
        self,
        plugin: str,
        parameters: Mapping[str, str],
        remote_kind: Literal["FILE", "OBJ", "DRAM"],
        package: str = "nixl",
        *,
        progress_thread: bool = False,
    ) -> None:
        if plugin == "UCX" and not _INFINIBAND.exists():
            # Of no use here, and beside Debian's libnl UCX's InfiniBand module crashes the process when it exits.
            os.environ.setdefault("UCX_MODULES", "^ib")
        api = nixl_api(package)
        self.plugin = plugin
        self.name = f"kvtide-{uuid.uuid4().hex}"
        self._remote_kind = remote_kind
        # A progress thread is for an agent that peers read from; one that reads makes progress by asking.
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
        self.agent = api.nixl_agent(self.name, config)
        try:
            self.agent.create_backend(plugin, dict(parameters))
        except Exception as error:  # NIXL's errors have no base of their own
            listed = "is listed by NIXL but" if plugin in self.agent.get_plugin_list() else "is unknown to NIXL and"
            raise ConfigError(
                f"plugin {plugin!r} {listed} cannot be created here ({error}); see the messages of NIXL above"
            ) from None

    def close(self) -> None:
        """End NIXL's agent, and let go of its memory and threads."""
        del self.agent

    def register(self, address: int, length: int) -> Any:
        """Register memory for as long as the agent lives."""
        return self.agent.register_memory([(address, length, 0, "")], "DRAM", backends=[self.plugin])

    def metadata(self) -> bytes:
        """What a peer needs to read the memory that is registered by now."""
        return bytes(self.agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> None:
        """Make a peer's memory known."""
        self.agent.add_remote_agent(metadata)

    def forget(self, peer: str) -> None:
        """Drop a peer, after a fault too: until it is met anew, NIXL refuses every transfer with it."""
        with contextlib.suppress(Exception):  # NIXL has dropped it already
            self.agent.remove_remote_agent(peer)

    def move(
        self, operation: Literal["READ", "WRITE"], pieces: Sequence[Piece], peer: str | None = None
    ) -> list[Exception | None]:
        """Transfer all pieces at once and wait for all; per piece, None when its bytes are there, or its error."""
        outcomes: list[Exception | None] = [None] * len(pieces)
        running: dict[int, Any] = {}
        registered = []
        for at, piece in enumerate(pieces):
            try:
                if peer is None:
                    remote = [(piece.place, piece.length, piece.device, piece.meta)]
                    registered.append(self.agent.register_memory(remote, self._remote_kind, backends=[self.plugin]))
                running[at] = self._begin(operation, piece, peer or self.name)
                if self.agent.transfer(running[at]) == "DONE":
                    running.pop(at).release()
            except Exception as error:
                outcomes[at] = error
                self._release(running.pop(at, None))
        self._wait(running, outcomes)
        for remote in registered:
            self.agent.deregister_memory(remote, backends=[self.plugin])
        return outcomes

    def _begin(self, operation: str, piece: Piece, peer: str) -> Any:
        local = self.agent.get_xfer_descs([(piece.address, piece.length, 0)], "DRAM")
        remote = self.agent.get_xfer_descs([(piece.place, piece.length, piece.device)], self._remote_kind)
        return self.agent.initialize_xfer(operation, local, remote, peer, backends=[self.plugin])

    def _wait(self, running: dict[int, Any], outcomes: list[Exception | None]) -> None:
        polls = 0
        while running:
            for at, handle in list(running.items()):
                try:
                    done = self.agent.check_xfer_state(handle) == "DONE"
                except Exception as error:
                    outcomes[at] = error
                    done = True
                if done:
                    self._release(running.pop(at))
            polls += 1
            if running and polls > _EAGER_POLLS:
                time.sleep(min(_LONGEST_PAUSE, 2e-5 * (polls - _EAGER_POLLS)))

    def _release(self, handle: Any) -> None:
        if handle is not None:
            try:
                handle.release()
            except Exception:  # of a transfer that failed: NIXL frees it with the agent
                logging.getLogger(__name__).warning("NIXL does not release a failed transfer's handle")


def nixl_api(package: str = "nixl") -> Any:
    """NIXL's Python interface; `MissingExtra` without it, `ConfigError` where it is too old to be trusted.

    `package` is `nixl`, which chooses by the CUDA it finds, or one of the builds for one CUDA version; a process can
    load only one of them.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtra("NixlConnector", package, "nixl") from None
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise ConfigError(
            f"NIXL {version} is installed; at least 1.5.0 is needed, since older ones report short reads and writes "
            "to a full disk as done"
        )
    try:
        api = import_module(f"{package}._api")
    except ImportError as error:
        raise ConfigError(f"the package {package!r} ({version}) cannot be imported: {error}") from None
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports every agent on stdout otherwise
    return api
