"""The memory of answers: what it keeps, what leads to it, what is dropped and when."""

from __future__ import annotations

import msgspec
import pytest

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Match, Use
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.errors import InvalidProblem
from service.errors import ProblemError
from service.http.questions import ProblemBody, QuestionReader
from service.http.requests import TuneBody
from service.lookup import find
from service.lookup.cache import Answers, Rendered
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import H100, H200, winner
from tests.support.winners_in_memory import WinnersInMemory

KNOWN = Problem(m=4096, n=4096, k=4096)
NEAR = replace(KNOWN, m=8192)
FAR = Problem(m=64, n=64, k=64)


def rendered(
    problem: Problem,
    match: Match = Match.EXACT,
    *,
    pack: str | None = None,
    device: str = H200.slug,
) -> Rendered:
    model = H200 if device == H200.slug else H100
    kept = replace(winner(problem, device=model), pack=pack)
    return Rendered.of(replace(find.as_served(kept, lambda _: None), match=match))


def kept(*answers: Rendered, limit: int = 10) -> Answers:
    memory = Answers(limit)
    for answer in answers:
        memory.keep(answer, memory.generation)
    return memory


def problems(memory: Answers, *asked: Problem, device: str = H200.slug) -> set[Problem]:
    answers = memory.get_many(device, asked, find.ANY)
    return {answer.problem for answer in answers if answer is not None}


def kernel_of(answer: Rendered) -> str:
    assert answer.kernel is not None
    return answer.kernel


def test_what_is_rendered_is_the_document_of_the_answer() -> None:
    answer = rendered(KNOWN)
    decoded = msgspec.json.decode(answer.body, type=Answer)
    assert (decoded.problem, decoded.match, decoded.device) == (KNOWN, Match.EXACT, H200)
    assert answer.etag == rendered(KNOWN).etag
    assert answer.etag != rendered(KNOWN, pack="f" * 64).etag


@pytest.mark.parametrize(
    ("tags", "status"),
    [
        (None, 200),
        ("", 200),
        ('"other"', 200),
        ("{tag}", 304),
        ("W/{tag}", 304),
        ('"other", {tag}', 304),
        ('"other",W/{tag} ', 304),
        ("*", 304),
        ("x{tag}", 200),
    ],
)
def test_who_has_it_gets_no_body(tags: str | None, status: int) -> None:
    answer = rendered(KNOWN)
    given = None if tags is None else tags.format(tag=answer.etag)
    found, headers, body = answer.reply(given)
    assert found == status
    assert dict(headers)[b"etag"].decode() == answer.etag
    assert dict(headers)[b"cache-control"] == b"no-cache"
    assert body == (answer.body if status == 200 else b"")
    assert (b"content-length" in dict(headers)) == (status == 200)


def test_devices_and_exactness_are_told_apart() -> None:
    memory = kept(rendered(KNOWN), rendered(NEAR, Match.NEAREST), rendered(FAR, device=H100.slug))
    assert len(memory) == 3
    assert problems(memory, FAR, NEAR, KNOWN) == {NEAR, KNOWN}
    assert problems(memory, FAR, NEAR, KNOWN, device=H100.slug) == {FAR}
    asked = [FAR, NEAR, KNOWN, KNOWN]
    answers = memory.get_many(H200.slug, asked, find.EXACT)
    assert [answer and answer.problem for answer in answers] == [None, None, KNOWN, KNOWN]


def test_the_least_recently_used_go_first() -> None:
    sizes = [replace(KNOWN, m=m) for m in (64, 128, 192, 256, 320)]
    memory = kept(*map(rendered, sizes[:3]), limit=3)
    memory.get_many(H200.slug, [sizes[0]], find.ANY)
    memory.keep(rendered(sizes[3]), memory.generation)
    assert problems(memory, *sizes) == {sizes[0], sizes[2], sizes[3]}
    memory.get_many(H200.slug, [sizes[2]], find.EXACT)
    memory.keep(rendered(sizes[4]), memory.generation)
    memory.keep(rendered(sizes[1]), memory.generation)
    assert problems(memory, *sizes) == {sizes[1], sizes[2], sizes[4]}
    assert len(memory) == 3


def test_query_strings_lead_to_answers_as_long_as_there_are_any() -> None:
    known, near = rendered(KNOWN), rendered(NEAR, Match.NEAREST)
    memory = kept(known, near)
    memory.keep_query(b"known", known, find.EXACT, 0)
    memory.keep_query(b"near", near, find.ANY, 0)
    memory.keep_query(b"k" * 301, known, find.ANY, 0)
    assert memory.asked(b"known") is known
    assert memory.asked(b"near") is near
    assert memory.asked(b"k" * 301) is None
    memory.drop_changed([(H200.slug, KNOWN)])
    assert memory.asked(b"known") is None
    memory.keep(rendered(KNOWN, Match.NEAREST), memory.generation)
    assert memory.asked(b"known") is None, "the query asked for an exact answer"
    memory.keep(known, memory.generation)
    assert memory.asked(b"known") is known, "the query string leads there again"
    memory.clear()
    memory.keep(known, memory.generation)
    assert memory.asked(b"known") is None, "another device may be meant by now"


def test_query_strings_are_as_few_as_answers() -> None:
    memory = kept(rendered(KNOWN), limit=2)
    for query in (b"a", b"b"):
        memory.keep_query(query, rendered(KNOWN), find.ANY, 0)
    memory.asked(b"a")
    memory.keep_query(b"c", rendered(KNOWN), find.ANY, 0)
    assert [memory.asked(query) is not None for query in (b"a", b"b", b"c")] == [True, False, True]


def test_what_was_read_before_a_drop_is_not_kept() -> None:
    memory = kept(rendered(KNOWN))
    for drop in (
        memory.clear,
        lambda: memory.drop_changed([(H100.slug, FAR)]),
        lambda: memory.drop_packed((), {}),
    ):
        began = memory.generation
        drop()
        memory.keep(rendered(FAR), began)
        memory.keep_query(b"far", rendered(FAR), find.ANY, began)
        assert problems(memory, FAR) == set()
        memory.keep(rendered(FAR), memory.generation)
        assert problems(memory, FAR) == {FAR}
        assert memory.asked(b"far") is None
        memory.clear()


def test_a_change_drops_its_own_answer_and_guesses_around_it() -> None:
    other = replace(KNOWN, layout=Layout.NN)
    fp16 = replace(NEAR, dtype=DType.FP16)
    batched = replace(NEAR, batch=2)
    distant = replace(KNOWN, m=4096 * 8)  # 3 octaves: beyond any neighbour's reach
    guesses = [rendered(p, Match.NEAREST) for p in (NEAR, other, fp16, batched, distant)]
    measured = replace(KNOWN, m=4097)
    predicted = replace(KNOWN, n=2048)
    memory = kept(
        rendered(KNOWN), rendered(measured), rendered(predicted, Match.PREDICTED), *guesses
    )
    memory.drop_changed([(H100.slug, KNOWN)])
    assert len(memory) == 8, "another device's winners change nothing here"
    memory.drop_changed([(H200.slug, KNOWN)])
    asked = (KNOWN, measured, predicted, NEAR, other, fp16, batched, distant)
    assert problems(memory, *asked) == {measured, other, fp16, batched, distant}


def test_many_changes_drop_every_guess_alike() -> None:
    distant = replace(KNOWN, m=4096 * 64)
    memory = kept(rendered(distant, Match.NEAREST), rendered(FAR), rendered(KNOWN))
    memory.drop_changed((H200.slug, replace(KNOWN, m=m)) for m in range(64, 64 + 33))
    assert problems(memory, distant, FAR, KNOWN) == {FAR, KNOWN}


def test_answers_that_name_another_pack_than_there_is_are_dropped() -> None:
    gone, there = "0" * 64, "1" * 64
    sizes = [replace(KNOWN, m=m) for m in (64, 128, 192)]
    without, old, new = (
        rendered(problem, pack=pack)
        for problem, pack in zip(sizes, (None, gone, there), strict=True)
    )
    cublas = Rendered.of(
        replace(
            find.as_served(winner(FAR, use=Use.CUBLAS), lambda _: None),
            config=None,
        )
    )
    everything = (*sizes, FAR)
    memory = kept(without, old, new, cublas)
    memory.drop_packed({there, gone}, {})
    assert problems(memory, *everything) == {*everything}
    memory.drop_packed({there}, {})
    assert problems(memory, *everything) == {sizes[0], sizes[2], FAR}
    memory.drop_packed({there}, {kernel_of(without): there})
    assert problems(memory, *everything) == {sizes[2], FAR}
    memory.drop_packed({there, "2" * 64}, {kernel_of(new): "2" * 64})
    assert problems(memory, *everything) == {FAR}


def test_a_question_takes_what_an_order_takes() -> None:
    reader = QuestionReader(ProblemBody)
    sound = [
        {"m": 1, "n": 2, "k": 3},
        {"m": 1, "n": 2, "k": 2**31 - 1, "batch": 7, "dtype": "fp8_e4m3", "layout": "tn"},
        {"m": 1, "n": 2, "k": 3, "out": "f32", "accumulate": True, "layout": "nt"},
        {"m": 1, "n": 2, "k": 3, "dtype": "bf16.out_f32.accumulate", "accumulate": False},
        {"m": 1, "n": 2, "k": 3, "dtype": "fp8_e4m3", "scaling": "row"},
        {"m": 1, "n": 2, "k": 3, "grouping": "rows", "groups": 8},
        {"m": 1, "n": 2, "k": 3, "grouping": "rows", "batch": 8},
    ]
    wrong = [
        {},
        {"m": 1, "n": 2},
        {"m": 0, "n": 2, "k": 3},
        {"m": 2**31, "n": 2, "k": 3},
        {"m": True, "n": 2, "k": 3},
        {"m": 1.0, "n": 2, "k": 3},
        {"m": "1", "n": 2, "k": 3},
        {"m": 1, "n": 2, "k": 3, "dtype": "fp4"},
        {"m": 1, "n": 2, "k": 3, "dtype": None},
        {"m": 1, "n": 2, "k": 3, "x": 1},
        {"m": 1, "n": 2, "k": 3, "out": "e4m3"},
        {"m": 1, "n": 2, "k": 3, "out": "f32", "accumulate": 1},
        {"m": 1, "n": 2, "k": 3, "accumulate": True},
        {"m": 1, "n": 2, "k": 3, "groups": 8},
        {"m": 1, "n": 2, "k": 3, "grouping": "rows", "groups": 8, "batch": 4},
        {"m": 1, "n": 2, "k": 3, "epilogue": "magic"},
        {"m": 1, "n": 2, "k": 3, "epilogue": "bias", "batch": 2},
        {"m": 1, "n": 2, "k": 3, "epilogue": "bias", "out": "f32"},
        [1, 2, 3],
        None,
    ]
    for item in sound:
        assert reader.document(item).problem() == TuneBody.model_validate(item).problem()
    loud = {"m": 1, "n": 2, "k": 3, "layout": "TN"}
    assert reader.document(loud).problem() == Problem(m=1, n=2, k=3)
    for item in wrong:
        with pytest.raises((ProblemError, InvalidProblem)):
            reader.document(item).problem()
        with pytest.raises(ValueError, match=r"TuneBody|needs|must be|is the batch"):
            TuneBody.model_validate(item).problem()


def test_predictions_name_their_kernel_too() -> None:
    """So that a pack that holds it, once there is one, is named in the next answer."""

    source = WinnersInMemory([])
    answer = present(find.find(source, KNOWN, H200, accepted=find.ANY))
    assert answer.config is not None
    assert isinstance(answer.config.kernel, Kernel)
    assert Rendered.of(answer).kernel == answer.config.kernel.name
