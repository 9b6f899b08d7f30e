"""Signatures of statements: made with a key, and valid for this key and a single purpose."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gemmsmith.errors import Untrusted
from gemmsmith.signing import (
    PublicKey,
    Purpose,
    Signature,
    Signer,
    Trusted,
    trusted_folder,
    unsigned_allowed,
)

STATEMENT = {"problem": {"m": 1, "n": 2}, "pack": "ab"}


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "state" / "signing.key", "here")


def test_a_signature_is_valid_in_any_order_of_the_fields(signer: Signer) -> None:
    signature = signer.sign(Purpose.WINNER, STATEMENT)
    turned = dict(reversed(STATEMENT.items()))
    assert Trusted([signer.public]).check(Purpose.WINNER, turned, signature) == signer.public


@pytest.mark.parametrize(
    ("purpose", "statement"),
    [(Purpose.PACK, STATEMENT), (Purpose.WINNER, {**STATEMENT, "pack": "ac"})],
    ids=["another purpose", "another pack"],
)
def test_a_signature_is_valid_for_its_statement_only(
    signer: Signer, purpose: Purpose, statement: object
) -> None:
    signature = signer.sign(Purpose.WINNER, STATEMENT)
    with pytest.raises(Untrusted, match="altered"):
        Trusted([signer.public]).check(purpose, statement, signature)


@pytest.mark.parametrize("value", ["", "é", "AAAA", "x" * 88])
def test_a_malformed_signature_is_refused(signer: Signer, value: str) -> None:
    forged = replace(signer.sign(Purpose.WINNER, STATEMENT), value=value)
    with pytest.raises(Untrusted, match="altered"):
        Trusted([signer.public]).check(Purpose.WINNER, STATEMENT, forged)


def test_a_key_under_another_ones_identifier(signer: Signer, tmp_path: Path) -> None:
    other = Signer.create(tmp_path / "other.key")
    forged = Signature(key=signer.public.id, value=other.sign(Purpose.WINNER, STATEMENT).value)
    with pytest.raises(Untrusted, match="altered"):
        Trusted([signer.public]).check(Purpose.WINNER, STATEMENT, forged)


def test_missing_and_unknown_signers_have_different_errors(signer: Signer) -> None:
    with pytest.raises(Untrusted, match="not signed"):
        Trusted([signer.public]).check(Purpose.WINNER, STATEMENT, None)
    with pytest.raises(Untrusted, match="not among the 0"):
        Trusted().check(Purpose.WINNER, STATEMENT, signer.sign(Purpose.WINNER, STATEMENT))


def test_a_private_key_is_its_owners_and_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    made = Signer.create(path, "a b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["signing.key"]
    assert Signer.load(path).public == made.public
    with pytest.raises(FileExistsError):
        Signer.create(path)
    assert Signer.load(path).public == made.public
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        Signer.load(path)


@pytest.mark.parametrize("text", ["", "ed25519-private", "ed25519-private AAAA", "no key at all"])
def test_a_file_that_holds_no_private_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "signing.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="holds no private key"):
        Signer.load(path)


def test_public_keys_are_read_from_folders(signer: Signer, tmp_path: Path) -> None:
    folder = tmp_path / "trusted"
    assert not Trusted.load(folder).keys
    folder.mkdir()
    (folder / "here.pub").write_text(signer.public.line + "\n")
    (folder / "notes.txt").write_text("not a key")
    assert Trusted.load(folder, tmp_path / "none").keys == {signer.public.id: signer.public}
    (folder / "wrong.pub").write_text("ssh-ed25519 AAAA")
    with pytest.raises(ValueError, match=r"wrong\.pub"):
        Trusted.load(folder)


def test_a_public_key_reads_as_it_is_written(signer: Signer) -> None:
    assert PublicKey.parse(signer.public.line) == signer.public
    assert len(signer.public.id) == 16


def test_the_trusted_folder(tmp_path: Path) -> None:
    assert trusted_folder({"GEMMSMITH_TRUSTED": "/a/b"}) == Path("/a/b")
    assert trusted_folder({"XDG_CONFIG_HOME": "/c"}) == Path("/c/gemmsmith/trusted")


def test_unsigned_data_is_accepted_only_on_request() -> None:
    assert not unsigned_allowed({})
    assert not unsigned_allowed({"GEMMSMITH_UNSIGNED": "0"})
    assert unsigned_allowed({"GEMMSMITH_UNSIGNED": "1"})
    with pytest.raises(ValueError, match="takes 0 or 1"):
        unsigned_allowed({"GEMMSMITH_UNSIGNED": "maybe"})


@pytest.mark.parametrize("text", ["{}", "{}\n\n", "\n{}\r\n", "\ufeff{}\r\n", "  {}  "])
def test_keys_are_read_as_any_editor_saves_them(text: str, signer: Signer, tmp_path: Path) -> None:
    (tmp_path / "some.pub").write_text(text.format(signer.public.line), newline="")
    assert Trusted.load(tmp_path).keys == {signer.public.id: signer.public}
    private = tmp_path / "state" / "signing.key"
    private.write_text(text.format(private.read_text().strip()), newline="")
    assert Signer.load(private).public == signer.public


def test_joined_keys_are_trusted_for_the_purposes_of_both(signer: Signer) -> None:
    winners = Trusted([signer.public], [Purpose.WINNER])
    for both in (winners | Trusted(), winners | winners, Trusted() | winners):
        assert both.purposes == {signer.public.id: {Purpose.WINNER}}
    assert (winners | Trusted([signer.public])).purposes == {signer.public.id: set(Purpose)}


def test_a_broken_link_to_a_key_is_skipped(signer: Signer, tmp_path: Path) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "gone.pub").symlink_to(tmp_path / "nowhere.pub")
    assert Trusted.load(folder).keys == {}
