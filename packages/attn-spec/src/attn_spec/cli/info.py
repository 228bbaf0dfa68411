"""``info``: versions, devices, contracts, and each backend engine with the reason why it is or is not usable."""

from __future__ import annotations

import argparse
import json
from typing import Any

from attn_spec._contract import CONTRACTS
from attn_spec._environment import environment
from attn_spec._registry import installed, load


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, backends and why each is or is not usable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def report() -> dict[str, Any]:
    """Environment, contracts and the state of every backend engine on every device that it knows."""
    states: dict[str, dict[str, str]] = {}
    for name in installed():
        loaded = load(name)
        if loaded.backend is None:
            states[name] = {"import": str(loaded.error)}
            continue
        for engine in loaded.backend.engines:
            devices = loaded.backend.capabilities(engine).devices
            states[f"{name}:{engine}"] = {device: loaded.backend.unavailable(device, engine) or "usable" for device in devices}
    return {"environment": environment(), "contracts": list(CONTRACTS), "backends": states}


def run(options: argparse.Namespace) -> int:
    found = report()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    facts = found["environment"]
    print(f"python {facts['python']}, {facts['system']}, {facts['processor']}, {facts['cores']} cores")
    print("packages: " + ", ".join(f"{name} {version or 'not installed'}" for name, version in facts["packages"].items()))
    devices = [f"{device['name']} (sm {device['compute_capability']}, driver {device['driver']})" for device in facts["nvidia"]]
    print("NVIDIA devices: " + (", ".join(devices) or "none"))
    print("contracts: " + ", ".join(found["contracts"]))
    for name, states in found["backends"].items():
        for device, state in states.items():
            print(f"{name:32} {device:6} {state}")
    return 0
