"""What --strategy auto takes, of made-up links and seconds; and when a run that goes on chooses anew."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dist.cost.mpi_choices import UnknownChoice
from dist.cost.overlap import Training
from dist.wire import WireFormat
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.optimizer import AdamWSettings
from gpt2.parameters import Layout
from scripts.backends import auto, step_timing
from scripts.prediction.predictor import predicted_exchange, predicted_step
from scripts.settings.checks import complete
from scripts.settings.training import parse_settings
from scripts.training.folder import default_run_folder
from strategies import STRATEGIES, candidates

pytestmark = pytest.mark.any_mpi
PARAMETERS = 30_000_000
SLOW = 50e6  # bytes/s, 400 Mbit/s


def settings(*flags):
    return complete(parse_settings("", [*flags, "--out", "run"]), 4)[0]


def places(ranks: int, of_a_node: int) -> list[dict]:
    return [{"rank": rank, "node": rank // of_a_node} for rank in range(ranks)]


def world(ranks: int, of_a_node: int) -> SimpleNamespace:
    seats = places(ranks, of_a_node)
    return SimpleNamespace(size=ranks, places=seats, node_count=seats[-1]["node"] + 1)


def links(nodes: int, rate: float = SLOW) -> list[dict]:
    return [{"node": node, "latency_s": 1e-4, "in": rate, "out": rate, "both": rate} for node in range(nodes)]


@pytest.fixture
def choose(monkeypatch):
    """choose(ranks, of_a_node, compute_s=..., ...): what auto takes there. Its trial finds what `tried` says, or what
    the model says; `choose.tried` are those that it tried."""
    monkeypatch.setattr(auto, "library", lambda: "mpich")

    def chosen(ranks, of_a_node, *flags, compute_s=1.0, rate=SLOW, tried=lambda name: 1.0, **more):
        here, s, chosen.tried = world(ranks, of_a_node), settings(*flags), []
        found = links(here.node_count, rate) if here.node_count > 1 else []
        training = Training(PARAMETERS, compute_s, update_s=0.1, **more)
        cluster = auto.cluster_of(here, found)

        def trial(world, kinds, size, wire_format):
            chosen.tried = [*kinds]
            short = replace(training, parameters=size)
            return {name: tried(name) * exchange_s(kind, cluster, short) for name, kind in kinds.items()}

        monkeypatch.setattr(auto, "trial_seconds", trial)
        forms = auto.forms_on_cores(s, has_links=bool(found))
        return auto.choose_on_cores(here, forms, training, found, WireFormat())

    return chosen


def exchange_s(kind, cluster, training) -> float:
    return predicted_exchange(kind, cluster, training, "mpich").seconds if kind.traits.messages else 1e-3


def test_between_nodes_overlap_is_taken_where_it_pays(choose):
    choice = choose(4, 1, compute_s=3.0)
    assert (choice.name, choice.overlap) == ("hierarchical-sharded", True)
    assert "\n" not in choice.why
    assert choice.why.startswith("predicted ")
    assert choice.why.endswith(" more)")


def test_of_many_micro_steps_the_exchange_shows_but_in_the_last(choose):
    """Overlap of one in a hundred hides next to nothing, and costs nothing either: never worse than without."""
    few, many = (choose(4, 1, compute_s=3.0, micro_steps=count) for count in (1, 100))
    shown = [float(choice.why.split()[1]) for choice in (few, many)]  # seconds
    assert shown[1] > 1.2 * shown[0]


def test_on_one_node_nothing_hides_and_nothing_is_tried(choose):
    choice = choose(4, 4)
    assert (choice.name, choice.overlap) == ("hierarchical-sharded", False)
    assert choose.tried == []
    assert choose(4, 4, "--overlap").overlap  # as asked for


def test_one_rank_exchanges_nothing(choose):
    choice = choose(1, 1)
    assert (choice.name, choice.overlap) == ("hierarchical-sharded", False)
    assert choice.why == "one rank exchanges nothing; this strategy needs the least memory"
    assert choose.tried == []


def test_a_trial_corrects_the_model_where_the_best_are_near(choose):
    """Overlap hides all exchanges: the least memory wins. Of two near ones, an exchange longer than modelled loses."""
    hidden = {"compute_s": 100.0}
    assert choose(4, 1, **hidden).name == "sliced"
    assert len(choose.tried) == auto.CANDIDATES
    assert "corrected by a trial of " in choose(4, 1, **hidden).why
    slow = choose(4, 1, "--no-overlap", compute_s=1.0, tried=lambda name: 5.0 if "hierarchical" in name else 1.0)
    assert "hierarchical" not in slow.name
    assert {"hierarchical", "hierarchical-sharded"} & {*choose.tried}


def test_where_the_model_knows_nothing_all_are_tried(choose, monkeypatch):
    def unknown(*arguments):
        raise UnknownChoice("an MPI of nobody's")

    ring = STRATEGIES["ring"]
    monkeypatch.setattr(ring, "traits", ring.traits.changed(messages=None))
    monkeypatch.setattr("scripts.prediction.predictor.predicted_exchange", unknown)
    times = {"ring": 0.5}
    monkeypatch.setattr(sys.modules[__name__], "exchange_s", lambda *unused: 1.0)
    choice = choose(4, 1, "--no-overlap", tried=lambda name: times.get(name, 1.0))
    assert choice.name == "ring"
    assert {*choose.tried} == candidates("auto", "host").keys()


def test_a_trial_that_the_model_does_not_know_counts_by_its_bytes(monkeypatch):
    """Open MPI's reduce-scatter is known for large blocks only, and a slow network shortens the trial."""
    monkeypatch.setattr(auto, "library", lambda: "openmpi")
    monkeypatch.setattr(
        auto, "trial_seconds", lambda world, kinds, size, wire: sizes.append(size) or dict.fromkeys(kinds, 0.5)
    )
    sizes = []
    here = world(6, 1)
    cluster = auto.cluster_of(here, links(6, SLOW / 20))
    training = Training(PARAMETERS, 1.0, update_s=0.1)
    kind = STRATEGIES["reduce-scatter"]
    step = predicted_step(kind, cluster, training, "openmpi")
    assert step.exchange is not None
    corrected = auto.corrected({"one": (kind, step)}, here, cluster, training, WireFormat())
    (size,) = sizes
    with pytest.raises(UnknownChoice):
        predicted_exchange(kind, cluster, replace(training, parameters=size), "openmpi")
    assert corrected["one"].exchange.seconds == pytest.approx(0.5 * PARAMETERS / size)


def test_what_the_flags_say_is_kept():
    def names(*flags):
        return {(form.name, form.overlap) for form in auto.forms_on_cores(settings(*flags), has_links=True)}

    assert {name for name, _ in names()} == candidates("auto", "host").keys()
    assert ("hierarchical-sharded", True) in names()
    assert ("reduce-scatter", True) not in names()
    assert all(overlap for _, overlap in names("--overlap"))
    assert not any(overlap for _, overlap in names("--no-overlap"))
    assert all("bfloat16" in STRATEGIES[name].traits.wires for name, _ in names("--wire", "bfloat16"))
    kept = names("--wire", "bfloat16", "--error-feedback")
    assert kept
    assert all(STRATEGIES[name].traits.error_feedback for name, _ in kept)
    own = names("--op", "own")
    assert own
    assert all("own" in STRATEGIES[name].traits.operations for name, _ in own)


def test_overlap_is_open_with_auto_alone():
    assert settings().overlap is None
    assert settings("--strategy", "ring").overlap is False
    assert settings("--strategy", "ring", "--overlap").overlap is True
    assert settings("--no-overlap").overlap is False


class OneRank:
    def allgather(self, value):
        return [value]

    def bcast(self, value):
        return value


class Job(SimpleNamespace):
    def together(self, mistake):
        from contextlib import nullcontext

        return nullcontext()


def test_it_takes_nothing_that_does_not_fit(monkeypatch):
    job = Job(comm=OneRank(), size=4, local_size=1, node_count=4, node=0, host="node0", places=places(4, 1))
    s = replace(settings("--backend", "numpy", "--model", "gpt2-124M"))
    config = complete(s, 4)[1]
    forms = auto.forms_on_cores(s, has_links=True)
    need = {form.name: auto.needed_bytes(replace(s, strategy=form.name), config, job) for form in forms}
    assert need["ring"] > need["hierarchical-sharded"]
    monkeypatch.setattr("scripts.settings.memory.available_bytes", lambda: need["hierarchical-sharded"])
    fitting = {form.name for form in auto.fitting(forms, s, config, job)}
    assert fitting == {name for name, needed in need.items() if needed <= need["hierarchical-sharded"]}
    monkeypatch.setattr("scripts.settings.memory.available_bytes", lambda: 10**8)
    with pytest.raises(UserError, match=r"expected at most the 0[.]1 GB"):
        auto.fitting(forms, s, config, job)


def test_a_layer_stands_for_the_model_by_its_operations(monkeypatch):
    """Of one layer and few tokens' embeddings all is timed; more micro-steps and layers take longer, sharers less."""
    monkeypatch.setattr(step_timing, "slowest_s", lambda world, passes: 2.0)
    shape = "--n-layer", "1", "--n-embd", "64", "--n-head", "2", "--vocab-size", "128", "--context", "64"

    def compute_s(*flags):
        s, config = complete(parse_settings("", [*shape, *flags]), 4)
        return step_timing.timed_compute_s(None, s, config, load_kernels("numpy", 1))

    assert compute_s() == pytest.approx(2.0)
    assert compute_s("--grad-accum", "3") == pytest.approx(6.0)
    assert compute_s("--tensor-parallel", "2") == pytest.approx(1.0)
    deep = compute_s("--n-layer", "101")
    assert deep / 2.0 == pytest.approx(82.3, rel=0.01)  # embeddings, a fifth of the small model, are there once
    assert compute_s("--batch-size", "100000") == pytest.approx(compute_s("--batch-size", "50000") * 2)


def test_the_update_of_some_parameters_stands_for_all(monkeypatch):
    monkeypatch.setattr(step_timing, "slowest_s", lambda world, update: update() or 2.0)
    layout = Layout(GPT2Config(1, 2, 256, 64, 8192))
    assert layout.size > 2 * step_timing.UPDATED
    seconds = step_timing.timed_update_s(None, layout, AdamWSettings(), load_kernels("numpy", 1))
    assert seconds == pytest.approx(2.0 * layout.size / step_timing.UPDATED)


def test_a_run_goes_on_as_it_chose_unless_its_nodes_changed():
    s, job = settings(), world(4, 2)
    around = auto.surroundings(s, job, links(2))
    kept = {"strategy": "ring", "overlap": True, "around": around}

    def again(ranks=4, of_a_node=2, rate=SLOW, flags=()):
        now = settings(*flags)
        return auto.kept_choice(kept, auto.surroundings(now, world(ranks, of_a_node), links(2, rate)), now)

    assert (again().name, again().overlap) == ("ring", True)
    assert again(rate=1.5 * SLOW) == again()  # rates are never twice the same
    assert again(rate=3 * SLOW) is None
    assert again(rate=SLOW / 3) is None
    assert again(of_a_node=3) is None
    assert again(ranks=8) is None
    assert again(flags=["--no-overlap"]) is None
    assert again(flags=["--wire", "bfloat16"]) is None
    assert auto.kept_choice(None, around, s) is None


def test_the_run_folder_says_who_chose():
    assert default_run_folder("ring", by_auto=True).name.endswith("-auto-ring")
    assert not default_run_folder("ring", by_auto=False).name.endswith("-auto-ring")
