"""A Slurm of this machine alone: munge, a controller and two nodes in a temporary folder, while the tests take."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

NODES = ("n1", "n2")
_PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian puts daemons, which users do not search
_CONF = """\
ClusterName=dpbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=30
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=1
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs Debian's slurm-wlm and munge (no {', '.join(absent)})" if absent else None


class Slurm:
    """A running cluster, for a `with` block.

    Args:
        folder: For its files; short, because sockets have short paths.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        names = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder / path}" for name, path in {**names, "seed-file": "munged.seed"}.items()]
        try:
            self._start("munged", "--foreground", "--force", *options)
            wait(lambda: (self.folder / "munge.socket").exists(), "munge does not start", 120)
            (self.folder / "slurm.conf").write_text(self._conf(), encoding="utf-8")
            (self.folder / "state").mkdir()
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            wait(lambda: self("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() == "2", self._logs, 300)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._daemons and self._daemons[-1].poll() is None:
            self("scancel", "--full", "--user", getpass.getuser())
            with suppress(TimeoutError):
                wait(lambda: not self("squeue", "-h").strip(), "", 40)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def __call__(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints."""
        made = subprocess.run(
            command, env={**self.environment, **(environment or {})}, capture_output=True, text=True, timeout=300
        )
        return made.stdout

    def state(self, job: str) -> str:
        """Of a job, such as RUNNING; "" once Slurm has forgotten it."""
        return self("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    def _start(self, *command: str) -> None:
        with open(self.folder / f"daemon-{len(self._daemons)}.log", "wb") as log:
            # The daemons end with the tests, however these end.
            ending = ["setpriv", "--pdeathsig", "TERM", *command]
            self._daemons.append(subprocess.Popen(ending, env=self.environment, stdout=log, stderr=log))

    def _conf(self) -> str:
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = [f"NodeName={n} NodeAddr=127.0.0.1 Port={p} CPUs=2" for n, p in zip(NODES, ports, strict=True)]
        host = socket.gethostname().partition(".")[0]
        return _CONF.format(
            host=host,
            controller=controller,
            user=getpass.getuser(),
            folder=self.folder,
            nodes="\n".join(nodes),
        )

    def _logs(self) -> str:
        tails = [path.read_text(errors="replace")[-1000:] for path in sorted(self.folder.glob("daemon-*.log"))]
        return "Slurm does not start:\n" + "\n".join(tails)


def wait(condition: Callable[[], bool], why: str | Callable[[], str], seconds: float) -> None:
    """Until a condition holds.

    Raises:
        TimeoutError: It does not, in all that time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(why if isinstance(why, str) else why())
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
