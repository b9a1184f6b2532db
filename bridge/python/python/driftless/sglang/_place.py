"""The directory where plugins and followers of one user meet, and the file that tells of a rank there."""

import json
import os
import stat
from pathlib import Path


def directory() -> Path:
    """``DRIFTLESS_PLUGIN_DIR``, or one in shared memory for each user."""
    return Path(os.environ.get("DRIFTLESS_PLUGIN_DIR") or f"/dev/shm/driftless-{os.geteuid()}")


class RankFile:
    """``rank-<port>-<rank>.json``: that this rank of an engine has the plugin, and what it did with each delta.

    A follower believes it as long as the process is the one that wrote it. It is replaced whole, and never removed: a
    file of a process that has ended tells nothing.
    """

    def __init__(self, where: Path, port: int, rank: int, ranks: int) -> None:
        """Makes the directory, for this user alone.

        Raises:
            OSError: the directory cannot be made, is another user's, or is open to others.
        """
        where.mkdir(mode=0o700, exist_ok=True)
        found = where.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{where} is not a directory that only user {os.geteuid()} can enter (mode 0700)")
        self._path = where / f"rank-{port}-{rank}.json"
        self._content = {"pid": os.getpid(), "start": _start(), "ranks": ranks, "why_not": None, "deltas": {}}
        self._write()

    def refuse(self, why: str) -> None:
        """This rank never patches."""
        self._content["why_not"] = why
        self._write()

    def tell(self, file: str, target: str, why_not: str | None) -> None:
        """The delta in ``file``, to the version of the label ``target``, is prepared; or why it is not."""
        self._content["deltas"][file] = {"target": target, "why_not": why_not}
        self._write()

    def keep(self, files: set[str]) -> None:
        """Forgets the deltas in other files."""
        deltas = self._content["deltas"]
        if deltas.keys() - files:
            self._content["deltas"] = {file: told for file, told in deltas.items() if file in files}
            self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content))
        partial.replace(self._path)


def _start() -> int:
    """When this process began, in the kernel's clock ticks: with its number it names the process."""
    text = Path("/proc/self/stat").read_text()
    return int(text[text.rindex(")") :].split()[20])
