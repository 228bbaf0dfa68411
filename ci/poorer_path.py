"""PATH of a machine that has fewer tools than this one."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["path_without"]


def path_without(folder: Path, *prefixes: str) -> str:
    """PATH without the commands whose names start with one of ``prefixes``; ``folder`` takes links to what lies beside them."""
    found = []
    for number, source in enumerate(dict.fromkeys(os.environ["PATH"].split(os.pathsep))):
        commands = list(Path(source).iterdir()) if Path(source).is_dir() else []
        left = [command for command in commands if not command.name.startswith(prefixes)]
        if len(left) == len(commands):
            found.append(source)
            continue
        mirror = folder / str(number)
        mirror.mkdir(parents=True, exist_ok=True)
        for command in left:
            if not (mirror / command.name).is_symlink():
                (mirror / command.name).symlink_to(command)
        found.append(str(mirror))
    return os.pathsep.join(found)
