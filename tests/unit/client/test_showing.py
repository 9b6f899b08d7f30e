"""How answers and jobs are shown: briefly, with their numbers, and without a service's HTML."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gemmsmith import Answer, Client, NotTuned, Problem, TunedAnswer
from gemmsmith.core.config import Match, Use
from gemmsmith.core.tuning import JobState
from gemmsmith.http.jobs import JobEvent, JobStatus
from gemmsmith.http.progress import Display, NotebookCell, TerminalLine, progress
from gemmsmith.showing import address, bar, document, line, lines, table
from tests.support.replacing import replace
from tests.unit.client.misbehaving import NOT_TUNED, Misbehaving, Say, job, stream

EVIL = "<script>alert('&')</script>"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(**more: Any) -> JobStatus:
    fields = {"id": "j1", "state": JobState.RUNNING, "problem": Problem(256, 4096, 4096)} | more
    return JobStatus(**fields)


def test_an_answer_is_a_line(answer: Answer) -> None:
    assert repr(answer) == (
        "<Answer 256×4096×4096 bf16 tn: exact, cutlass, 15.7 µs (547.1 TFLOP/s), "
        "1.180× the default [1.170, 1.190]>"
    )
    assert (
        repr(answer.config) == "<Config cutlass3x_sm90_example@heuristic.s1.data_parallel.x1.sm0>"
    )
    assert repr(answer.config.kernel) == "<Cutlass3xKernel cutlass3x_sm90_example>"
    assert repr(answer.config.launch) == "<Launch heuristic.s1.data_parallel.x1.sm0>"


def test_numbers_are_those_that_were_measured(answer: Answer) -> None:
    assert answer.tflops == pytest.approx(2 * 256 * 4096 * 4096 / 15.7e-6 / 1e12)
    assert answer.baseline_tflops == pytest.approx(2 * 256 * 4096 * 4096 / 18.6e-6 / 1e12)
    measured = Problem(512, 4096, 4096)
    near = replace(answer, match=Match.NEAREST, measured=measured)
    assert near.tflops == pytest.approx(2 * answer.tflops)
    assert "nearest: 512×4096×4096 bf16 tn" in repr(near)


def test_a_predicted_answer_has_no_throughput(answer: Answer) -> None:
    predicted = replace(
        answer, match=Match.PREDICTED, measured=None, use=Use.CUBLAS, statistics=None,
        baseline=None, speedup=None, revision=None, predicted_us=17.0, stale=True,
    )  # fmt: skip
    assert (predicted.tflops, predicted.baseline_tflops) == (None, None)
    assert repr(predicted) == (
        "<Answer 256×4096×4096 bf16 tn: predicted, cublas, 17.0 µs expected, stale>"
    )
    assert "TFLOP/s" not in predicted._repr_html_()


def test_what_is_served_comes_first(answer: Answer) -> None:
    kept = replace(answer, use=Use.CUBLAS)
    assert repr(kept) == "<Answer 256×4096×4096 bf16 tn: exact, cublas, 18.6 µs (461.8 TFLOP/s)>"
    html = kept._repr_html_()
    assert html.index("18.6 µs") < html.index("best candidate") < html.index("15.7 µs")
    assert "its speedup" in html


def test_times_of_a_recorded_gpu_say_so(answer: Answer) -> None:
    replayed = replace(answer, replayed=True)
    assert "15.7 µs (547.1 TFLOP/s), recorded H200" in repr(replayed)
    assert replayed._repr_html_().count("µs (") == replayed._repr_html_().count("recorded H200")
    job = status(phase="screen", done=12, total=48, best_us=15.7, recorded="NVIDIA H200")
    assert "best 15.7 µs (recorded H200)" in repr(job)
    assert "15.7 µs (recorded H200)" in job._repr_html_()
    event = JobEvent(id="1", kind="progress", data={"best_us": 14.0, "recorded": "NVIDIA H200"})
    assert "14.0 µs (recorded H200)" in status(best_us=15.7).updated(event).line


def test_an_answer_is_plain_data(answer: Answer) -> None:
    assert msgspec.convert(answer.to_dict(), Answer) == answer
    assert answer.to_dict()["config"]["kernel"]["backend"] == "cutlass3x"
    assert answer.config.to_dict() == answer.to_dict()["config"]
    assert answer.config.kernel.to_dict() == answer.to_dict()["config"]["kernel"]


def test_html_has_nothing_of_a_services_own(answer: Answer) -> None:
    shown = answer._repr_html_()
    assert '<td style="text-align:left">15.7 µs (547.1 TFLOP/s)</td>' in shown
    evil = replace(
        answer,
        device=replace(answer.device, name=EVIL),
        config=replace(answer.config, kernel=replace(answer.config.kernel, name=EVIL)),
    )
    for text in (
        evil._repr_html_(),
        status(id=EVIL, phase=EVIL, error=EVIL, best_us=1.0, best=EVIL, device=EVIL)._repr_html_(),
        table(EVIL, [(EVIL, EVIL)]),
    ):
        assert "<script" not in text
        assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in text
        assert text.count("<table>") == text.count("</table>") == 1


def test_a_job_is_a_line() -> None:
    job = status(phase="screen", done=12, total=48, best_us=15.7)
    assert repr(job) == (
        "<JobStatus j1 256×4096×4096 bf16 tn: running, screen [######------------------] 12/48, "
        "best 15.7 µs>"
    )
    assert job.to_dict()["problem"]["m"] == 256
    assert "\n" not in repr(status(error="a\nb\x1b[2J"))
    assert "\x1b" not in line("\x1b[2J")


def test_bars_have_the_same_width() -> None:
    assert bar(0, 0) == ""
    assert {len(bar(done, 9)) for done in range(10)} == {len(bar(0, 9))}
    assert bar(9, 9).startswith("[########################]")
    assert bar(11, 9).startswith("[########################]")


def test_a_terminals_line_is_written_over() -> None:
    stream = Terminal()
    display = TerminalLine(stream)
    display.show(status(phase="compiling", done=1, total=9))
    display.show(status(phase="compiling", done=1, total=9))
    display.show(status(state=JobState.DONE))
    display.close()
    before, first, second = stream.getvalue().removesuffix("\n").split("\r")
    assert before == ""
    assert "compiling" in first
    assert second.startswith("j1 256×4096×4096 bf16 tn: done ")
    assert len(first) == len(second)  # no character of the longer line is left


def test_a_log_gets_a_line_a_phase() -> None:
    stream = io.StringIO()
    display = TerminalLine(stream)
    for done in range(5):
        display.show(status(phase="screen", done=done, total=5))
    display.show(status(phase="finals", done=0, total=3))
    display.close()
    assert [text.split(", ")[1].split()[0] for text in stream.getvalue().splitlines()] == [
        "screen",
        "finals",
    ]


def test_a_notebooks_cell_changes_in_place() -> None:
    shown: list[Any] = []

    def display(job: JobStatus, *, display_id: bool) -> SimpleNamespace:
        shown.append(("new", job, display_id))
        return SimpleNamespace(update=lambda later: shown.append(("update", later)))

    cell = NotebookCell(display)
    for done in range(3):
        cell.show(status(done=done))
    cell.close()
    assert [what for what, *_ in shown] == ["new", "update", "update"]
    assert shown[-1][1].done == 2


@pytest.mark.parametrize(("kernel", "kind"), [(object(), NotebookCell), (None, TerminalLine)])
def test_notebooks_are_known_by_their_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: object, kind: type
) -> None:
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    shown = SimpleNamespace(display=lambda *_: None)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    assert isinstance(progress(True), kind)
    assert type(progress(False)) is Display


def test_waiting_shows_the_job(
    client: Client, server: Misbehaving, served: Say, answer: Answer,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server.say(
        job("waiting"),
        stream(
            (1, "created", {}),
            (2, "progress", {"phase": "screen", "done": 5, "total": 9}),
            (3, "finished", {}),
        ),
        job("done", winner_revision=1),
        served,
    )
    handle = client.tune(256, 4096, 4096)
    assert repr(handle) == "<TuningJob j1 256×4096×4096 bf16 tn: waiting>"
    assert handle._repr_html_() == handle.status._repr_html_()
    assert handle.wait(timeout=30, progress=True) == TunedAnswer.of(answer, answer)
    printed = capsys.readouterr()
    assert [text.split(": ")[1] for text in printed.err.splitlines()] == [
        "waiting",
        "running, screen [#############-----------] 5/9",
        "done",
    ]
    assert printed.out == ""


def test_not_tuned_says_how_to_tune(client: Client, server: Misbehaving) -> None:
    server.say(NOT_TUNED)
    with pytest.raises(NotTuned) as caught:
        client.best(256, 4096, 64, batch=2, dtype="float16", device="nvidia-h200-132sm")
    call = (
        "client.tune(256, 4096, 64, batch=2, dtype='fp16', layout='tn', device='nvidia-h200-132sm')"
    )
    assert caught.value.call == call
    assert str(caught.value) == f"404 Not tuned yet: POST /tune. Tune it with {call}"
    problem = {"m": 256, "n": 4096, "k": 64, "batch": 2, "dtype": "fp16"}
    server.say(job("waiting", problem=problem))
    eval(call, {"client": client})
    assert b'"batch": 2' in server.seen[-1].body


def test_the_url_is_the_environments(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_URL", f"{server.url}/")
    with Client(cache_dir=None) as client:
        assert client.url == server.url
    with Client("http://other", cache_dir=None) as client:
        assert client.url == "http://other"
    monkeypatch.setenv("GEMMSMITH_URL", "localhost:8000")
    with pytest.raises(ValueError, match="URL must be like"):
        Client(cache_dir=None)
    for nothing in ("", " "):
        monkeypatch.setenv("GEMMSMITH_URL", nothing)
        with Client(cache_dir=None) as client:
            assert client.url == "http://127.0.0.1:8000"
    with pytest.raises(ValueError, match="URL must be like"):
        Client("", cache_dir=None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:8000/x", "http://me:***@host:8000/x"),
        ("at http://me:se@cret@host, and", "at http://me:***@host, and"),
        ("postgresql://me:se/cret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:12345@host", "postgresql://me:***@host"),
        ("'http://me:secret@host:99999'", "'http://me:***@host:99999'"),
        ("http://me:se'cret@host", "http://me:***@host"),
        ("https://token@host/x", "https://***@host/x"),
        ("socks5://token@host", "socks5://***@host"),
        ("postgresql://h/db?user=me&password=secret", "postgresql://h/db?user=me&password=***"),
        ("https://h/?api_key=secret&m=1#x", "https://h/?api_key=***&m=1#x"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("http://[::1]:8000/a", "http://[::1]:8000/a"),
        ("sqlite:////home/a@b.db", "sqlite:////home/a@b.db"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("kernel:name@launch", "kernel:name@launch"),
    ],
)
def test_urls_are_shown_without_their_passwords(text: str, shown: str) -> None:
    assert line(text) == shown
    assert json.loads(document(json.dumps({"text": text}))) == {"text": shown}


def test_an_address_without_a_scheme_hides_its_password() -> None:
    assert address("me:secret@host/db") == "me:***@host/db"
    assert address("host:8000") == "host:8000"


def test_untrusted_text_is_a_single_line() -> None:
    evil = "\x1b[2J\x9b2J\r\nerror: forged\u2028\u202e\x7f\ud800"
    assert line(evil).isprintable()
    assert "forged" in line(evil)
    assert line("x" * 10**6) == "x" * 10_000 + "…"
    assert lines(f"a\n{evil}b").count("\n") == 2
    shown = document(json.dumps([evil], ensure_ascii=False))
    assert shown.isprintable()
    assert json.loads(shown) == [evil]
