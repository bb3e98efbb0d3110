"""The story model: its text is clean, its training learns, its shipped files agree."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from tilewise.models import ModelConfig, build_model, load_model

ROOT = Path(__file__).parents[1]
STORY = ROOT / "tilewise" / "assets" / "story"
sys.path.insert(0, str(ROOT / "examples"))

import story_card  # noqa: E402
import story_data  # noqa: E402
import story_stream  # noqa: E402
import train_story_model  # noqa: E402

STORY_TEXT = (
    "A small hen lived on a hill. She had three chicks, and they were always hungry.\n"
    '"Go and dig," said the hen, "and you will find a worm." So they dug until the sun went down, '
    "and there was supper enough for all of them. Then they slept under her warm wings.\n"
)


def make_stories(count: int, seed: int) -> Iterator[str]:
    """Yield stories of short sentences with random words, so that no two repeat each other."""
    rng = random.Random(seed)
    people = ("Anna", "Ben", "the fox", "the hen", "Grandpa", "the queen", "Tom", "a frog")
    things = ("boat", "cake", "drum", "kite", "lamp", "pear", "shoe", "stone", "tree", "wheel")
    looks = ("blue", "heavy", "little", "new", "old", "round", "shiny", "warm")
    places = ("barn", "brook", "garden", "house", "meadow", "wood")
    for _ in range(count):
        sentences = []
        for _ in range(8):
            a, b = (rng.choice(people) for _ in range(2))
            line = f"{a} gave {b} a {rng.choice(looks)} {rng.choice(things)} in the "
            sentences.append(line[0].upper() + line[1:] + f"{rng.choice(places)}.")
        yield " ".join(sentences)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A file of sixty stories and a folder of four one-story books."""
    folder = tmp_path / "text"
    (folder / "books").mkdir(parents=True)
    tales = f"\n{story_data.END}\n".join(make_stories(60, seed=1))
    (folder / "tales.txt").write_text(tales, "utf-8")
    for number, story in enumerate(make_stories(4, seed=2)):
        (folder / "books" / f"{number}.txt").write_text(story, "utf-8")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of 64 channels gain nothing from threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestCleaning:
    def test_typography_becomes_ascii(self) -> None:
        text = "\u201cWell\u2014it\u2019s\u00a0late\u2026\u201d\ufeff\x0c"
        assert story_data.normalize(text) == '"Well--it\'s late..."'

    def test_licence_text_is_cut_off(self) -> None:
        text = (
            "The Project Gutenberg eBook\n*** START OF THIS PROJECT GUTENBERG EBOOK HENS ***\n"
            f"{STORY_TEXT}*** END OF THIS PROJECT GUTENBERG EBOOK HENS ***\nLicence\n"
        )
        assert list(story_data.clean(text)) == [STORY_TEXT.strip()]

    def test_wrapped_lines_are_joined_and_plain_lines_are_kept(self) -> None:
        assert story_data.split_paragraphs("one\ntwo\n\nthree\n") == ["one two", "three"]
        assert story_data.split_paragraphs("one\ntwo\n") == ["one", "two"]

    @pytest.mark.parametrize(
        "line",
        [
            "CHAPTER IV. The Hen Goes Out",
            "Contents",
            "I A FAT HEN 1 II A THIN HEN 6 III THE NEST 11 IV THE FOX 16",
            "1. The Hen 2. The Fox 3. The Barn 4. The End of the Day",
            "The Old Barn The White Hen The Long Day How the Fox Came Home Again At Last",
            'Page 10: "hne" changed to "hen".',
            "THE HEN AND THE FOX AND THE LONG WAY HOME",
            "12mo. Illustrated. Price 50 cents per volume, postpaid.",
            "Illustration: The hen digs.",
            "+-----+ | HENS | +-----+",
            "See https://example.org for more hens and foxes of this kind.",
            "By Arthur B. Hen",
            "In the next story I will tell you about the fox.",
            "The End",
            "* * *",
        ],
    )
    def test_apparatus_is_dropped(self, line: str) -> None:
        cleaned = story_data.clean_paragraph(line)
        assert not cleaned or not story_data.is_story(cleaned)
        assert line not in story_data.clean_document(f"{STORY_TEXT}{line}\n{STORY_TEXT}")

    @pytest.mark.parametrize(
        "line",
        [
            '"How?"',
            '"I am!"',
            "By and by Reddy went home to the barn.",
            "The prince was changed to a frog.",
            "It was the end of a long day.",
            '"Oh, my dear children!" cried the hen.',
            "I went out, and I saw 3 hens.",
        ],
    )
    def test_prose_is_kept(self, line: str) -> None:
        assert story_data.clean_paragraph(line) == line
        assert story_data.is_story(line)

    @pytest.mark.parametrize(
        ("raw", "cleaned"),
        [
            ("She _never_ dug. [Illustration: a hen]", "She never dug."),
            ("She dug.[12] He ran.*", "She dug. He ran."),
            ("ONCE UPON a time", "Once Upon a time"),
            ("THERE was once a hen", "There was once a hen"),
            ('"WHO are you?" said she', '"Who are you?" said she'),
            ("MASTER MEADOW MOUSE ran home", "Master Meadow Mouse ran home"),
            ("I am a hen", "I am a hen"),
            ("OK, but be quick", "OK, but be quick"),
            ("Wait . . . I hear  it .", "Wait... I hear it."),
            ("the field- and forest-folk", "the field- and forest-folk"),
            ("an old- fashioned hen", "an old-fashioned hen"),
            ("3. The hen dug.", "The hen dug."),
        ],
    )
    def test_marks_and_capitals_are_removed(self, raw: str, cleaned: str) -> None:
        assert story_data.clean_paragraph(raw) == cleaned

    def test_unfinished_last_sentence_is_cut(self) -> None:
        text = f"{STORY_TEXT}The fox came, and then he saw that the door of the little house was"
        assert story_data.clean_document(text) == STORY_TEXT.strip()

    def test_short_texts_prefaces_and_fragments_are_refused(self) -> None:
        preface = "The author of this series thanks the readers of these books and their publisher."
        assert story_data.clean_document("A hen dug.") == ""
        assert story_data.clean_document(preface * 4) == ""
        assert story_data.clean_document(f"and so {STORY_TEXT}") == ""

    def test_cut_off_opening_is_joined(self) -> None:
        opening, rest = "Once there was a hen. She dug.", "One day, she found a worm."
        other = "One day, a fox named Red came by."
        assert list(story_data.join_openings([opening, rest])) == [f"{opening}\n{rest}"]
        assert list(story_data.join_openings([opening, other])) == [opening, other]


class TestCorpus:
    def test_repeats_of_held_out_text_are_dropped_from_training(self) -> None:
        first, second = make_stories(2, seed=3)
        documents = [
            story_data.Document("a", first, False),
            story_data.Document("a", second, False),
            story_data.Document("b", first, True),
        ]
        kept = story_data.drop_repeats(documents)
        assert [(d.text, d.held_out) for d in kept] == [(first, True), (second, False)]

    def test_prepare_holds_out_whole_files_and_every_fiftieth_story(
        self, text_folder: Path, tmp_path: Path
    ) -> None:
        meta = story_data.prepare(text_folder, tmp_path / "data", 320)
        assert meta["vocab_size"] == 320
        assert [meta["train"][s]["documents"] for s in ("books", "tales")] == [3, 58]
        assert [meta["val"][s]["documents"] for s in ("books", "tales")] == [1, 2]
        tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
        data = story_stream.Data.load(tmp_path / "data", torch.device("cpu"))
        part = meta["val"]["books"]
        book = (text_folder / "books" / "2.txt").read_text("utf-8")
        assert tokenizer.decode(data.val[part["start"] : part["end"]].tolist()) == book

    def test_an_epoch_shows_each_document_as_often_as_its_weight(self) -> None:
        documents = [[0, *range(10 * d + 1, 10 * d + 6)] for d in range(40)]
        tokens = torch.tensor([*(t for document in documents for t in document), 0])
        ranges = {"a": {"start": 0, "end": 120}, "b": {"start": 120, "end": 240}}
        stream = story_stream.TokenStream(
            tokens, ranges, {"a": 2.0}, 6, torch.Generator().manual_seed(0)
        )
        counts = dict.fromkeys(range(40), 0)
        for ids, targets in stream.epoch(4):
            assert torch.equal(ids[:, 1:], targets[:, :-1])
            for row in ids.tolist():
                heads = [(row[i - 1], token) for i, token in enumerate(row) if i]
                for before, token in heads:
                    assert token == before + 1 or 0 in (before, token)
            for token in targets.flatten().tolist():
                if token % 10 == 3:
                    counts[token // 10] += 1
        doubled = sum(counts[d] for d in range(20))
        assert 1.5 < doubled / sum(counts[d] for d in range(20, 40)) < 2.5

    def test_unknown_source_is_refused(self) -> None:
        with pytest.raises(ValueError, match="weights must name one of"):
            story_stream.TokenStream(
                torch.zeros(3), {"a": {"start": 0, "end": 2}}, {"b": 1.0}, 4, torch.Generator()
            )


class TestTraining:
    @pytest.mark.usefixtures("one_thread")
    def test_smoke_run_lowers_the_loss_and_writes_a_checkpoint(
        self, text_folder: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "story"
        folders = ["--text", text_folder, "--data", tmp_path / "data", "--out", out]
        sizes = ["--vocab", 400, "--tiny", "--steps", 20, "--evaluations", 2]
        train_story_model.main([str(word) for word in [*folders, *sizes, "--device", "cpu"]])
        log = story_card.read_log(out / "log.jsonl")
        losses = [record["loss"] for record in log["train"]]
        assert losses[-1] < losses[0] - 1.0
        best = log["result"][0]["best"]
        assert best["mean"] < log["val"][0]["mean"] - 1.0
        model = load_model(out)
        assert model.embed_tokens.weight.dtype == torch.bfloat16
        data = story_stream.Data.load(tmp_path / "data", torch.device("cpu"))
        again = train_story_model.evaluate(model, data, train_story_model.TINY)
        assert again["mean"] == pytest.approx(best["mean"], rel=0.01)

        pytest.importorskip("matplotlib")
        story_card.draw_losses(log, out / "loss.png")
        card = story_card.write_card(log, out, "## Data\nOurs.")
        assert (out / "loss.png").stat().st_size > 0
        assert f"{log['result'][0]['parameters']:,}" in card
        assert f"{best['all']:.3f}" in card

    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize(
        ("ends", "code", "reason"),
        [
            ("nan", 1, "loss or gradient was not finite at step 3"),
            ("SIGINT", 130, "SIGINT came after step 3"),
        ],
    )
    def test_a_run_that_ends_early_writes_its_best_weights_and_says_so(
        self, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        ends: str, code: int, reason: str,
    ) -> None:  # fmt: skip
        compute, calls = train_story_model.compute_loss, []

        def loss(*args: Any) -> torch.Tensor:
            if args[-1] == "mean":
                calls.append(None)
                if len(calls) == 4:  # the first one warms up
                    if ends == "nan":
                        return compute(*args) * float("nan")
                    signal.raise_signal(signal.SIGINT)
            return compute(*args)

        monkeypatch.setattr(train_story_model, "compute_loss", loss)
        out = tmp_path / "story"
        folders = ["--text", text_folder, "--data", tmp_path / "data", "--out", out]
        sizes = ["--vocab", 400, "--tiny", "--steps", 8, "--evaluations", 8]
        with pytest.raises(SystemExit) as raised:
            train_story_model.main([str(word) for word in [*folders, *sizes, "--device", "cpu"]])
        assert raised.value.code == code
        (result,) = story_card.read_log(out / "log.jsonl")["result"]
        assert reason in result["stopped"]
        assert "NaN" not in (out / "log.jsonl").read_text()
        assert all(p.isfinite().all() for p in load_model(out).parameters())

    def test_learning_rate_rises_then_falls_to_zero(self) -> None:
        rates = [train_story_model.learning_rate(step / 100) for step in range(101)]
        assert rates[0] == 0.0
        assert max(rates) == pytest.approx(1.0)
        assert rates[3:] == sorted(rates[3:], reverse=True)
        assert rates[-1] == pytest.approx(0.0)

    def test_dropout_acts_in_training_only(self) -> None:
        settings = train_story_model.TINY
        model = build_model(train_story_model.make_config(settings, 300))
        train_story_model.add_dropout(model, 0.5)
        ids = torch.arange(8)[None]
        model.eval()
        quiet = model(ids)
        assert torch.equal(quiet, model(ids))
        model.train()
        assert not torch.equal(model(ids), quiet)

    def test_settings_are_parsed_and_unknown_ones_refused(self) -> None:
        base = train_story_model.Settings()
        changed = train_story_model.parse_settings(base, "dropout=0.2,layers=3")
        assert (changed.dropout, changed.layers, changed.lr) == (0.2, 3, base.lr)
        assert train_story_model.parse_settings(base, "default") == base
        with pytest.raises(ValueError, match="setting must be one of"):
            train_story_model.parse_settings(base, "depth=3")


class TestShippedModel:
    def test_configuration_is_a_small_gqa_llama(self) -> None:
        config = ModelConfig.from_hf(json.loads((STORY / "config.json").read_text("utf-8")))
        assert config.architecture == "LlamaForCausalLM"
        assert config.tie_word_embeddings
        assert config.num_q_heads > config.num_kv_heads
        assert config.max_position_embeddings == 1024
        assert (config.bos_token_id, config.eos_token_ids) == (0, (0,))

    def test_weights_are_bfloat16_and_within_the_limits(self) -> None:
        assert (STORY / "model.safetensors").stat().st_size <= 16_000_000
        parameters = 0
        with safe_open(STORY / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                assert tensor.dtype == torch.bfloat16
                assert bool(tensor.isfinite().all()), name
                parameters += tensor.numel()
        assert parameters <= 8_000_000
        assert f"{parameters:,}" in (STORY / "README.md").read_text("utf-8")

    @pytest.mark.parametrize(
        "text",
        [
            "Once upon a time, there was a hen.",
            '"Oh!" said she.\n\nAnd  so\tthey went -- home. ',
            "Zo\u00eb \u00e4\u00df \u4e2d\u6587 \U0001f98a\U0001f468\u200d\U0001f467",
            "\x00\x7f 12,345.67 a_b <b>",
            "",
        ],
    )
    def test_tokenizer_returns_any_text(self, text: str) -> None:
        tokenizer = Tokenizer.from_file(str(STORY / "tokenizer.json"))
        ids = tokenizer.encode(text).ids
        assert ids[0] == tokenizer.token_to_id(story_data.END) == 0
        assert tokenizer.decode(ids) == text

    def test_tokenizer_matches_the_embedding_and_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(STORY)
        ours = Tokenizer.from_file(str(STORY / "tokenizer.json"))
        config = json.loads((STORY / "config.json").read_text("utf-8"))
        assert ours.get_vocab_size() == config["vocab_size"] == len(theirs)
        text = "Once upon a time, there was a \U0001f98a."
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 0)

    def test_card_names_the_numbers_of_its_log(self) -> None:
        card = (STORY / "README.md").read_text("utf-8")
        log = story_card.read_log(STORY / "log.jsonl")
        result = log["result"][0]
        for number in (result["steps"], result["tokens"], result["parameters"]):
            assert f"{number:,}" in card
        for source in log["run"][0]["data"]["val"]:
            assert f"{result['best'][source]:.3f}" in card
        for name in ("loss.png", "CDLA-Sharing-1.0", "Apache-2.0", "public domain", "seed"):
            assert name in card
        assert (STORY / "loss.png").stat().st_size > 0

    def test_it_knows_simple_stories(self) -> None:
        """A uniform guess costs 12 bits a token and unigrams about 9; the text is the test's."""
        model = load_model(STORY, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(STORY / "tokenizer.json"))
        ids = torch.tensor([tokenizer.encode(STORY_TEXT.strip()).ids])
        with torch.no_grad():
            logits = model.compute_logits(model(ids[:, :-1]))
        bits = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]) / torch.log(
            torch.tensor(2.0)
        )
        assert bits < 6.0
