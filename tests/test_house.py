"""The house rules that a parser can check: who may import whom, and who may name what.

The tables below are the plan of `docs/architecture.md`. Where the code teaches better,
the plan changes first, then this file, then the code.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "stagehand"
ARCHITECTURE = ROOT.parent.parent / "docs" / "architecture.md"

# Rank, then parts, then the part's files. A file may import lower ranks, and the files
# of its own part that stand before it; parts of one rank do not import each other. A
# folder is a part, and so is a single file, but for those listed under "": one part.
PLAN: dict[int, dict[str, tuple[str, ...]]] = {
    0: {
        "": (
            *("errors", "units", "names", "settings", "attribute", "frames"),
            "torch_private",
        )
    },
    1: {
        "core": (
            *("states", "machine", "workers", "copies", "device"),
            *("stopwatch", "clock", "telemetry"),
            *("limits", "turn", "hidden_gradients"),
            *("ledger", "arena", "layout", "belongings", "saved"),
            *("trees", "casts", "terms", "steps"),
            *("wire_ring", "traffic", "flight", "transfer"),
        )
    },
    2: {
        "stores": (
            "base",
            "module",
            "headers",
            "checkpoint",
            "reading",
            "files",
            "pages",
            "safetensors",
            "pickled",
            "wired",
            *("packed_stream", "packed_layout", "packing_triton", "unpacking"),
            *("packing", "packed", "packed_files"),
            *("squareq_layout", "squareq_triton", "dequantizing"),
            *("squareq_manifest", "squareq", "file_wire", "compact_wires"),
            *("writing", "converting"),
        )
    },
    3: {
        "residency": (
            *("residency", "blocks", "handles", "finding", "masters", "order"),
            *("timeline", "spread", "stays", "plan", "keeping"),
            *("holds", "turns", "shares", "seats", "shared"),
            *("loader", "lane_loader", "host_loader"),
            *("slots", "mover", "lookahead", "scheduler", "steering"),
        )
    },
    4: {
        **dict.fromkeys(("graph", "autocast", "differentiation", "guards"), ()),
        "weights": (
            *("edges", "rows", "stray_uses", "strays", "hooks", "state_dicts"),
            *("entrances", "sites", "experts"),
        ),
        "gradients": ("uses", "home", "arrivals", "gradients"),
        "streamer": (
            *("depths", "progress", "layers", "images", "rates", "stages", "handover"),
            *("pipeline", "streamer", "grid", "outcomes", "trial", "tuner"),
        ),
        "conductor": (
            *("rules", "config", "slots", "budget", "link", "record", "adapters"),
            *("parts", "runtime"),
        ),
        "activations": (
            *("pool", "prefix", "pieces", "timing", "relief", "carrier", "learning"),
            *("books", "returning", "room", "spill", "saving", "recompute", "record"),
            *("config", "advice", "parts", "within", "runtime"),
        ),
        "pretrained": (
            *("operators", "deferred", "naming", "transformers_models"),
            *("diffusers_models", "sources", "scratch", "matching"),
        ),
        "optim": ("rounding", "states", "update", "overlap", "scaler", "adamw"),
    },
    5: {
        "": (
            *("weak_refs", "config", "report", "budget_errors", "assembly", "wires"),
            "foreign",
            *("additions", "measure", "files"),
            *("decoding", "compact", "quantized_layers", "host_memory"),
            *("tenancy", "kept_views", "uses", "placing", "moves", "data_parallel"),
            "passing",
            *("sharing", "storing"),
            *("conducted", "runtime", "modes", "loading", "pipelines"),
        )
    },
    6: {
        "compat": ("ramtorch", "layer_streamer"),
        "cli": ("models", "tasks", "outcome", "command", "main"),
    },
}

# What `import stagehand` promises. Adding one is a decision, removing one breaks code.
EXPECTED_PUBLIC = (
    *("ActivationRuntime", "ActivationStagehandConfig"),
    *("CheckpointError", "ClosedError", "ConductorConfig", "ConductorRuntime"),
    *("ConfigError", "InvalidStateTransitionError"),
    *("LayerStreamer", "LayerStreamerTuner"),
    *("PinnedPool", "Pipeline", "Report", "ResidentPriority", "StagehandConfig"),
    "StagehandError",
    *("StagehandInternalError", "StagehandOOMError", "StagehandRuntime"),
    *("StagehandWarning", "__version__", "activations", "grad", "gradient_edges"),
    *("layer", "load"),
    "pipeline",
)

# Bookkeeping: tested without a device, so it and what it imports do without torch.
PURE = {
    *(
        "errors",
        "units",
        "names",
        "settings",
        "core/states",
        "core/clock",
        "core/telemetry",
    ),
    *("core/limits", "core/ledger", "residency/order", "residency/timeline"),
    *("frames", "residency/plan", "residency/spread", "residency/stays"),
    *("activations/prefix", "activations/relief"),
    "conductor/rules",
    "residency/keeping",
    *("residency/residency", "residency/holds", "residency/turns", "residency/shares"),
}

# Files that may break a rule, because they are where its subject lives.
DEVICE_FILES = {"core/device", "torch_private"}
THREAD_FILES = {"core/workers"}
PRIVATE_TORCH_FILES = {"torch_private"}
PRINTING_PARTS = {"cli"}

DEVICE_WORDS = {"cuda", "hpu", "xpu", "pin_memory", "memory_allocated"}
TORCH_DEVICE_NAMES = {"Stream", "Event", "current_stream", "accelerator"}
THREAD_NAMES = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor"}
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"),
    *("linspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("tensor", "zeros"),
}
EMPTY_WORDS = {
    *("manager", "handler", "helper", "entry", "hub", "bridge", "coordinator"),
    *("context", "data", "info", "misc"),
}


def first_line(name: str) -> str:
    """Return the sentence with which a file says what it is."""
    return (ast.get_docstring(parse(name)) or "").split("\n\n")[0].replace("\n", " ")


def file_tables() -> str:
    """Return what `docs/architecture.md` lists: ranks, parts, files, first lines."""
    lines = []
    for rank, parts in PLAN.items():
        lines += [f"### Rank {rank}", ""]
        single = [
            name for part, files in parts.items() for name in single_files(part, files)
        ]
        folders = {part: files for part, files in parts.items() if part and files}
        for part, files in {"": single, **folders}.items():
            if not files:
                continue
            title = f"`{part}/`" if part else "file"
            what = first_line(f"{part}/__init__") if part else "what it is"
            lines += [f"| {title} | {what} |", "|---|---|"]
            names = [f"{part}/{stem}".removeprefix("/") for stem in files]
            lines += [f"| `{n.rpartition('/')[2]}` | {first_line(n)} |" for n in names]
            lines.append("")
    return "\n".join(lines)


def single_files(part: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of a part that has no folder."""
    if not part:
        return files
    return () if files or not (ROOT / f"{part}.py").exists() else (part,)


def module_names() -> list[str]:
    """Return each file as its path under the package, without `.py`."""
    return sorted(
        path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py")
    )


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def place_of(name: str) -> tuple[int, str, int] | None:
    """Return a file's rank, part and place in its part; None if the plan has none."""
    folder, _, stem = name.rpartition("/")
    for rank, parts in PLAN.items():
        if not folder and stem in parts.get("", ()):
            return rank, "", parts[""].index(stem)
        if not folder and stem in parts:
            return rank, stem, 0
        if folder in parts and stem == "__init__":
            return rank, folder, len(parts[folder])
        if folder in parts and stem in parts[folder]:
            return rank, folder, parts[folder].index(stem)
    return None


def imports_of(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield each imported module, those of the package by their path under it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (own_name(alias.name, known) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["stagehand", *name.split("/")][: -node.level]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                whole = own_name(f"{base}.{alias.name}", known)
                yield whole if whole in known else own_name(base, known)


def own_name(dotted: str, known: set[str]) -> str:
    """Return `stagehand.core.arena` as `core/arena`, anything else as it is."""
    if dotted != "stagehand" and not dotted.startswith("stagehand."):
        return dotted
    path = dotted.removeprefix("stagehand").removeprefix(".").replace(".", "/")
    package = f"{path}/__init__".removeprefix("/")
    return package if package in known or not path else path


def upward_imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name == "__init__":
        return
    place = place_of(name)
    if place is None:
        yield "has no place in the plan: give it one"
        return
    for target in imports_of(name, tree, known):
        if target == "__init__":
            allowed = place[0] > max(rank for rank in PLAN if "" in PLAN[rank])
        elif target in known:
            other = place_of(target)
            allowed = other is not None and is_below(other, place)
        else:
            continue
        if not allowed:
            yield f"imports stagehand.{target.replace('/', '.')}, which is not below it"


def is_below(one: tuple[int, str, int], other: tuple[int, str, int]) -> bool:
    return one[0] < other[0] or (one[:2] == other[:2] and one[2] < other[2])


def impure_imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name not in PURE:
        return
    for target in imports_of(name, tree, known):
        if target.split(".")[0] == "torch":
            yield f"imports {target}"
        elif target in known and target not in PURE:
            yield f"imports {target}, which may import torch"


def missing_heads(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring"
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "__all__" not in names and not name.endswith("/__init__"):
        yield "has no __all__"


def docstrings_of(tree: ast.Module) -> set[ast.AST]:
    """Return the constants that stand as statements: docstrings, also of fields."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def words_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each identifier, and the words of each text that is not a docstring."""
    docstrings = docstrings_of(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield line, word
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                yield line, word
            case ast.keyword(arg=str(word)):
                yield line, word
            case ast.alias(name=dotted, asname=asname):
                yield from ((line, word) for word in [*dotted.split("."), asname or ""])
            case ast.ImportFrom(module=str(dotted)):
                yield from ((line, word) for word in dotted.split("."))
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield from ((line, word) for word in re.findall(r"\w+", text))


def torch_chains(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Yield `torch.a.b` as its names, whatever the file calls its parts."""
    local: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = getattr(node, "module", None)
        for alias in node.names:
            names = ".".join(filter(None, [base, alias.name])).split(".")
            if names[0] == "torch":
                yield node.lineno, names
                bound = alias.asname or (alias.name if base else names[0])
                local[bound] = names if alias.asname or base else names[:1]
    for node in ast.walk(tree):
        names = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name) and inner.id in local:
            yield node.lineno, [*local[inner.id], *reversed(names)]


def device_names(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name in DEVICE_FILES:
        return
    for line, word in words_of(tree):
        if word in DEVICE_WORDS:
            yield f"line {line} names {word}"
    for line, names in torch_chains(tree):
        for word in TORCH_DEVICE_NAMES.intersection(names):
            yield f"line {line} names torch's {word}"


def private_torch(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name in PRIVATE_TORCH_FILES:
        return
    for line, names in torch_chains(tree):
        if any(re.match(r"_(?!_)", word) for word in names):
            yield f"line {line} names {'.'.join(names)}"


def threads(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name in THREAD_FILES:
        return
    for line, word in words_of(tree):
        if word in THREAD_NAMES:
            yield f"line {line} names {word}"
    if "_thread" in imports_of(name, tree, known):
        yield "imports _thread"


def prints(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if name.partition("/")[0] in PRINTING_PARTS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"line {node.lineno} prints"


def broad_excepts(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    # Only to give back what is held, and raise again, may everything be caught.
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {
            inner.id
            for inner in ast.walk(node.type or node)
            if isinstance(inner, ast.Name)
        }
        last = node.body[-1]
        raises = isinstance(last, ast.Raise) and last.exc is None
        if node.type is None or "Exception" in caught:
            yield f"line {node.lineno} catches everything"
        elif "BaseException" in caught and not raises:
            yield f"line {node.lineno} catches everything and does not raise it again"


def empty_names(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    named = [name.rpartition("/")[2]]
    named += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for each in named:
        words = re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", each)
        if words and words[-1].lower().removesuffix("s") in EMPTY_WORDS:
            yield f"{each} is named {words[-1]}: say what it is"


def default_places(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    # A user may have set another default device.
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=word)
            ) if word in FACTORIES:
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    yield f"line {node.lineno} calls torch.{word} without a device"


RULES = (
    *(upward_imports, impure_imports, missing_heads, device_names, private_torch),
    *(threads, prints, broad_excepts, empty_names, default_places),
)


def test_architecture_lists_every_file_with_its_first_line():
    tables = file_tables()
    listed = tables in ARCHITECTURE.read_text(encoding="utf-8")
    assert listed, f"docs/architecture.md should have, in its place:\n\n{tables}"


def test_architecture_sends_changes_to_files_that_are_there():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = text.partition("## Where a change goes")[2].partition("## Words")[0]
    named = re.findall(r"`([\w/]+)`", rows)
    there = {name.rstrip("/") for name in named}
    assert len(there) > 20
    assert there <= {
        *module_names(),
        *(part for parts in PLAN.values() for part in parts),
    }


def test_public_names_are_the_promised_ones():
    [names] = [
        ast.literal_eval(node.value)
        for node in parse("__init__").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert tuple(names) == EXPECTED_PUBLIC


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_keeps_the_rule(rule):
    known = set(module_names())
    broken = [
        f"src/stagehand/{name}.py {problem}"
        for name in sorted(known)
        for problem in rule(name, parse(name), known)
    ]
    assert not broken, "\n".join(broken)


# Each rule is broken here once, so that a rule that sees nothing is seen.
HEAD = '"""Head."""\n__all__ = []\n'
KNOWN = {
    *("__init__", "errors", "units", "core/__init__", "core/states", "core/device"),
    *("core/ledger", "core/transfer", "stores/base", "stores/module", "graph"),
    *("weights", "runtime", "cli/main", "compat/ramtorch", "residency/plan"),
}
BROKEN = [
    (upward_imports, "core/ledger", "from stagehand.stores.base import Store"),
    (upward_imports, "core/ledger", "import stagehand.stores.base"),
    (upward_imports, "core/ledger", "def f():\n    from stagehand.stores import base"),
    (upward_imports, "core/ledger", "from ..stores import base"),
    (upward_imports, "core/ledger", "from stagehand.core import transfer"),
    (upward_imports, "core/ledger", "from .transfer import Ticket"),
    (upward_imports, "core/ledger", "import stagehand.core"),
    (upward_imports, "errors", "from stagehand.units import MIB"),
    (upward_imports, "weights", "from stagehand import graph"),
    (upward_imports, "cli/main", "import stagehand.compat.ramtorch"),
    (upward_imports, "runtime", "import stagehand"),
    (upward_imports, "core/unplanned", ""),
    (impure_imports, "core/ledger", "from torch import nn"),
    (impure_imports, "residency/plan", "from stagehand.core.device import Device"),
    (missing_heads, "core/ledger", "x = 1"),
    (device_names, "stores/base", "torch.cuda.synchronize()"),
    (device_names, "stores/base", "from torch.cuda import synchronize"),
    (device_names, "stores/base", "x = f'cuda:{0}'"),
    (device_names, "stores/base", "import torch\nevent = torch.Event()"),
    (device_names, "stores/base", "from torch import Stream as Lane"),
    (device_names, "stores/base", "torch.empty(1, pin_memory=True)"),
    (private_torch, "stores/base", "import torch\ntorch._C.f()"),
    (private_torch, "stores/base", "from torch.utils import _pytree"),
    (private_torch, "stores/base", "from torch import utils as u\nu._pytree.f()"),
    (threads, "stores/base", "import threading\nthreading.Thread()"),
    (threads, "stores/base", "import _thread"),
    (threads, "stores/base", "from concurrent.futures import ThreadPoolExecutor as P"),
    (prints, "stores/base", "print(1)"),
    (broad_excepts, "stores/base", "try:\n    f()\nexcept Exception:\n    raise"),
    (broad_excepts, "stores/base", "try:\n    f()\nexcept:\n    raise"),
    (broad_excepts, "stores/base", "try:\n    f()\nexcept BaseException:\n    g()"),
    (empty_names, "stores/base", "class PoolManager: ..."),
    (empty_names, "core/device_info", ""),
    (default_places, "stores/base", "import torch\ntorch.empty(3, dtype=torch.uint8)"),
]
KEPT = [
    (upward_imports, "core/transfer", "from stagehand.core.ledger import Ledger"),
    (upward_imports, "core/transfer", "from stagehand import errors"),
    (upward_imports, "cli/main", "import stagehand"),
    (device_names, "core/device", "torch.cuda.synchronize()"),
    (device_names, "stores/base", "def f():\n    'As cuda does.'"),
    (device_names, "stores/base", "from stagehand.core.device import Event\nEvent()"),
    (device_names, "core/transfer", "import threading\nthreading.Event()"),
    (private_torch, "stores/base", "import torch\ntorch.__version__"),
    (threads, "stores/base", "import threading\nself._thread = threading.get_ident()"),
    (prints, "cli/main", "print(1)"),
    (broad_excepts, "runtime", "try:\n    f()\nexcept BaseException:\n    raise"),
    (empty_names, "core/ledger", "class Metadata: ..."),
    (default_places, "stores/base", "import torch\ntorch.empty(3, device=x.device)"),
    (default_places, "stores/base", "import torch\ntorch.empty_like(x)"),
]


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_rule_sees_what_breaks_it(rule, name, source):
    head = "" if rule is missing_heads else HEAD
    assert list(rule(name, ast.parse(head + source), KNOWN))


@pytest.mark.parametrize(("rule", "name", "source"), KEPT)
def test_rule_leaves_the_rest_alone(rule, name, source):
    assert not list(rule(name, ast.parse(HEAD + source), KNOWN))
