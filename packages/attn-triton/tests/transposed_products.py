"""Whether a product of blocks takes a transposed product, read from Triton's own code (TTIR) of a kernel.

Triton 3.4 to 3.7.0 compiles ``tl.dot(tl.trans(x), y)`` wrongly for Hopper where x comes of another ``tl.dot``
(https://github.com/fla-org/flash-linear-attention/issues/640), so the kernels compute such a product with its operands exchanged instead.
"""

import re

import triton
import triton.language as tl
from triton.compiler import ASTSource

_VALUE = r"%[\w.$-]+(?:#\d+)?"
_PRODUCT = r"\btt\.dot(?:_scaled)?\b"


def products(ttir):
    """How many products of blocks the code has."""
    return len(re.findall(rf"= {_PRODUCT}", ttir))


def transposed_products(ttir):
    """The products that take a value which comes of a transposed product, through operations on elements and through loops."""
    lines = [line.split(" loc(")[0].strip() for line in ttir.splitlines() if not line.startswith("#")]
    flows, found = list(_flows(lines)), []
    kinds = {}
    while True:
        before = {value: set(kind) for value, kind in kinds.items()}
        for operation, results, operands in flows:
            kind = set().union(*(kinds.get(operand, set()) for operand in operands))
            if operation == "product":
                kind = {"product"}
            elif operation == "load":
                kind = set()
            elif operation == "transpose" and "product" in kind:
                kind |= {"transposed"}
            for result in results:
                kinds.setdefault(result, set()).update(kind)
        if kinds == before:
            break
    for line in lines:
        if re.search(rf"= {_PRODUCT}", line):
            left, right = re.findall(_VALUE, line.split("=", 1)[1])[:2]
            if "transposed" in kinds[left] | kinds[right]:
                found.append(line)
    return found


def _flows(lines):
    """(operation, results, operands) of each line; what a loop yields reaches its results and its next turn, one by one."""
    regions = []
    for line in lines:
        head = re.match(rf"({_VALUE})(?::(\d+))? = (.*)", line)
        results = []
        if head:
            name, count, rest = head[1], head[2], head[3]
            results = [name] if count is None else [f"{name}#{place}" for place in range(int(count))]
        else:
            rest = line
        carried = re.findall(rf"({_VALUE}) = ({_VALUE})", (re.search(r"iter_args\((.*?)\)", rest) or [None, ""])[1])
        if re.match(r"scf\.(?:for|if|while)\b", rest):
            regions.append((results, [argument for argument, _ in carried]))
            for place, (argument, start) in enumerate(carried):
                yield "move", [argument, *results[place : place + 1]], [start]
        elif rest.startswith("scf.yield"):
            outer, arguments = regions[-1]
            for place, value in enumerate(re.findall(_VALUE, rest)):
                yield "move", [*outer[place : place + 1], *arguments[place : place + 1]], [value]
        elif results:
            kind = (
                "product"
                if re.match(_PRODUCT, rest)
                else "transpose"
                if rest.startswith("tt.trans")
                else "load"
                if rest.startswith("tt.load")
                else "move"
            )
            yield kind, results, re.findall(_VALUE, rest)
        if regions and re.match(r"\}(?!\)| else| do)", line):
            regions.pop()


@triton.jit
def _at_once(x, out):
    slot = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    a = tl.load(x + slot)
    tl.store(out + slot, tl.dot(tl.trans(tl.dot(a, a)), a))


@triton.jit
def _behind_a_loop(x, out, turns):
    """The transposed product is one of the turn before, with an exponential in between."""
    slot = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    a = tl.load(x + slot)
    acc, last = tl.zeros([32, 32], tl.float32), tl.zeros([32, 32], tl.float32)
    for _ in range(turns):
        acc = tl.dot(a, tl.trans(tl.exp(last)), acc)
        last = tl.dot(a, a)
    tl.store(out + slot, acc)


@triton.jit
def _of_operands(x, out, turns):
    """What kernels may do: an operand from memory is transposed, a product is an operand as it is, and one is stored transposed."""
    slot = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    a = tl.load(x + slot)
    acc = tl.zeros([32, 32], tl.float32)
    for _ in range(turns):
        acc = tl.dot(tl.exp(tl.dot(a, tl.trans(a))), a, acc)
    tl.store(out + slot, tl.trans(acc))


CONTROLS = {"at once": _at_once, "behind a loop": _behind_a_loop, "of operands": _of_operands}


def controls(target):
    """By name, the offences of kernels that do what is looked for, and of one that does not."""
    found = {}
    for name, function in CONTROLS.items():
        signature = {argument: "i32" if argument == "turns" else "*fp32" for argument in function.arg_names}
        found[name] = transposed_products(triton.compile(ASTSource(function, signature), target=target).asm["ttir"])
    return found
