"""What ranks agree on before they add up."""

from __future__ import annotations

import pytest
import torch

from tilewise.distributed.shard_group import ShardGroup


@pytest.mark.parametrize("refused", [[0.0, 0.0], [0.0, 1.0]])
def test_whether_all_have_buffers_is_not_asked_through_the_buffers(monkeypatch, refused):
    """A rank without them would wait for words, and the others for its arrival at a barrier."""
    group, memory, asked = ShardGroup(0, 2, torch.device("cpu")), object(), []
    group._buffer, group._memory = torch.zeros(4), memory

    def stack(x):
        asked.append(group._memory)
        return torch.tensor(refused).unsqueeze(1)

    monkeypatch.setattr(group, "stack", stack)
    is_refused = any(refused)
    assert group._agreed(None) == ("rank 1 cannot" if is_refused else None)
    assert asked == [None]
    assert group._memory is (None if is_refused else memory)
    assert (group._buffer is None) == is_refused
