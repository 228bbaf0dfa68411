"""PATH of a machine that has fewer tools than this one."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["path_without"]

FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")


def path_without(folder: Path, *prefixes: str) -> str:
    """``folder``, filled with links to the commands beside this Python and of the system whose names start with none of ``prefixes``."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in dict.fromkeys([str(Path(sys.executable).parent), *FOLDERS]):
        for command in Path(source).iterdir():
            if not command.name.startswith(prefixes) and not (folder / command.name).exists():
                (folder / command.name).symlink_to(command)
    return str(folder)
