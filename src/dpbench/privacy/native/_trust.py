"""Whether files could be somebody else's work: code and choices are read only where nobody else may write."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def mistrust(status: os.stat_result, sticky_suffices: bool = False) -> str | None:
    """Say why somebody else could have written a file or into a folder; None where only the user and root could.

    Args:
        status: Of the file or folder.
        sticky_suffices: Of a folder in which others may write, but not replace what is not theirs, as in /tmp.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {status.st_uid})"
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    by_others = status.st_mode & stat.S_IWOTH
    if not by_group and not by_others:
        return None
    if sticky_suffices and status.st_mode & stat.S_ISVTX:
        return None
    return "may be written by other users"


def _is_private_group(number: int) -> bool:
    """Whether a group has the user's name and no other member: many systems let it write to what the user makes."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(number)
    except KeyError:
        return False
    has_name = number == user.pw_gid and group.gr_name == user.pw_name
    return has_name and set(group.gr_mem) <= {user.pw_name}


def mistrusted_folder(folder: Path, own: int) -> str | None:
    """Say why somebody else could put files into a folder, or exchange it; None where only the user and root could.

    Args:
        folder: Without links.
        own: How many folders, counted from this one upwards, are ours alone; above, the sticky bit suffices.

    Raises:
        OSError: There is no such folder.
    """
    for height, path in enumerate((folder, *folder.parents)):
        doubt = mistrust(os.lstat(path), sticky_suffices=height >= own)
        if doubt is not None:
            return f"{path} {doubt}"
    return None


def make_folder(folder: Path) -> None:
    """Make a folder and those above that are missing, which nobody else may read or write, whatever the umask is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
