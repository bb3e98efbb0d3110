"""Decoders made of the parameters of others, and weights written anew where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.tiny import make_hf, save_hf
from tilewise.models import Decoder, load_model
from tilewise.models.sharing import move, refill, sharing, why_not_refill
from tilewise.nn.experts import Experts

# Whatever a decoder may be packed into: tied heads, gates, biases, mixtures, latents, learnt
# positions, norms of other kinds.
CASES = (
    "llama",
    "llama_mha_tied",
    "qwen3_biases",
    "gpt2",
    "gpt2_untied",
    "gemma3",
    "deepseek",
    "gpt_oss_tied_no_biases",
    "gpt_oss",
)
IDS = torch.tensor([[5, 9, 30, 12, 7, 3]])


def pair(tmp_path: Path, case: str, dtype: str = "float32") -> tuple[Decoder, Decoder]:
    """Return two models of one shape with other weights."""
    made = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        save_hf(make_hf(case, seed), folder)
        made.append(load_model(folder, dtype=dtype))
    return made[0], made[1]


def held(model: Decoder):
    parameters = dict(model.named_parameters())
    return parameters.__getitem__


def logits(model: Decoder) -> Tensor:
    with torch.inference_mode():
        return model.compute_logits(model(IDS))


@pytest.mark.parametrize("case", CASES)
def test_a_packed_model_has_the_new_weights_where_the_old_ones_lay(
    case: str, tmp_path: Path
) -> None:
    first, second = pair(tmp_path, case)
    names = [name for name, _ in second.named_parameters()]
    engine = sharing(first, "auto", torch.device("cpu"), held(first))
    fresh = sharing(second, "auto", torch.device("cpu"), held(second))
    new = {name: tensor.detach().clone() for name, tensor in second.named_parameters()}
    for model in (engine, fresh):
        model.pack_for_inference()
    if case == "deepseek":  # whose dense attention comes before packing
        refill(engine, names, new.__getitem__)
        for mine, other in zip(engine.modules(), fresh.modules(), strict=True):
            if hasattr(mine, "panels"):
                assert torch.equal(mine.panels.words, other.panels.words)
        return
    before = logits(engine)
    places = [m.panels.words.data_ptr() for m in engine.modules() if hasattr(m, "panels")]
    refill(engine, names, new.__getitem__)
    assert [m.panels.words.data_ptr() for m in engine.modules() if hasattr(m, "panels")] == places
    assert not torch.equal(logits(engine), before)
    assert torch.equal(logits(engine), logits(fresh))


def scattered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors as views of one, at odd places, matrices with strides in turns."""
    buffer = torch.zeros(sum(x.numel() + x.numel() % 2 for x in tensors.values()) + 1).bfloat16()
    found, at = {}, 1
    for i, (name, x) in enumerate(tensors.items()):
        view = buffer[at : at + x.numel()]
        view = view.view(x.mT.shape).mT if i % 2 and x.dim() > 1 else view.view(x.shape)
        found[name] = view.copy_(x)
        at += x.numel() + x.numel() % 2
    return found


def words(model: Decoder) -> list[Tensor]:
    """Return all that products read, in order."""
    panels = [m.panels for m in model.modules() if hasattr(m, "panels")]
    for mixture in (m.packed for m in model.modules() if isinstance(m, Experts)):
        panels += [] if mixture is None else [*mixture.up, *mixture.down]
    held = [x for each in panels for x in (each.words, each.bias) if x is not None]
    return [*held, *model.parameters()]


@pytest.mark.parametrize("case", [*CASES, "llama, int8", "llama_mha_tied, int8"])
def test_new_weights_may_be_views_of_anything_and_stay_the_callers(
    case: str, tmp_path: Path
) -> None:
    case, _, is_int8 = case.partition(", ")
    first, second = pair(tmp_path, case, "bfloat16")
    engine, fresh = (sharing(m, "auto", torch.device("cpu"), held(m)) for m in (first, second))
    new = {name: x.detach().clone() for name, x in second.named_parameters()}
    given = scattered(new)
    for model in (engine, fresh):
        model.pack_for_inference(is_int8=bool(is_int8))
    refill(engine, given, given.__getitem__)
    assert all(torch.equal(x, new[name]) for name, x in given.items())
    for x in given.values():
        x.zero_()
    for mine, wanted in zip(words(engine), words(fresh), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama_mqa_biases", "gpt_oss", "deepseek"])
def test_weights_on_a_gpu_are_written_into_a_model_on_a_cpu(case: str, tmp_path: Path) -> None:
    first, second = pair(tmp_path, case)
    engine, fresh = (sharing(m, "auto", torch.device("cpu"), held(m)) for m in (first, second))
    given = {name: x.detach().cuda() for name, x in second.named_parameters()}
    for model in (engine, fresh):
        model.pack_for_inference()
    refill(engine, given, given.__getitem__)
    for mine, wanted in zip(words(engine), words(fresh), strict=True):
        assert torch.equal(mine, wanted)


def test_parameters_are_the_others_own_where_dtype_and_device_agree(tmp_path: Path) -> None:
    model, _ = pair(tmp_path, "llama")
    same = sharing(model, "auto", torch.device("cpu"), held(model))
    for name, parameter in same.named_parameters():
        assert parameter is model.get_parameter(name)
    narrow = sharing(model, "bfloat16", torch.device("cpu"), held(model))
    assert not {p.data_ptr() for p in narrow.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }
    assert not any(p.requires_grad for p in narrow.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_int8_weights_are_quantised_anew(tmp_path: Path) -> None:
    first, second = pair(tmp_path, "llama")
    made = [sharing(m, "auto", torch.device("cpu"), held(m)) for m in (first, second)]
    for model in made:
        model.pack_for_inference(is_int8=True)
    refill(made[0], [name for name, _ in second.named_parameters()], held(second))
    assert torch.equal(logits(made[0]), logits(made[1]))


def test_a_packed_model_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    model, _ = pair(tmp_path, "llama")
    with pytest.raises(TypeError, match="must be a decoder of load_model or build_model"):
        sharing(torch.nn.Linear(2, 2), "auto", torch.device("cpu"), held(model))
    assert why_not_refill(model) is None
    assert "decoder of this package" in str(why_not_refill(torch.nn.Linear(2, 2)))


def test_what_shares_memory_shares_it_after_a_move(tmp_path: Path) -> None:
    model, _ = pair(tmp_path, "llama")
    model.use_invariant_linears()
    tied = model.packed_head is not None
    places = len({t.data_ptr() for t in (*model.parameters(), *model.buffers())})
    move(model, torch.device("cpu"))
    assert len({t.data_ptr() for t in (*model.parameters(), *model.buffers())}) == places
    if tied:
        assert model.packed_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
