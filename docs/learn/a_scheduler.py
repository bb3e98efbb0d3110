# %% [markdown]
# # A scheduler in 60 lines, beside the real one
#
# A server has many texts under way. Each step of the model takes a number of tokens, from any of
# them: one new token of a text that is being written, or a part of a prompt that is being read.
# The scheduler says who gets how many. There is no phase of prompts and none of writing: a text
# has tokens, and some of them are computed.

# %%
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Text:
    name: str
    prompt: int  # tokens
    answer: int  # tokens to write
    tokens: int = field(init=False)  # there so far
    computed: int = 0  # whose keys and values are in the cache
    blocks: int = 0

    def __post_init__(self):
        self.tokens = self.prompt


class SmallScheduler:
    """First come, first served; one budget of tokens a step; the newest gives way."""

    def __init__(self, num_blocks, block_size, budget, seats):
        self.free, self.block_size = num_blocks, block_size
        self.budget, self.seats = budget, seats
        self.waiting, self.running = deque(), []

    def schedule(self):
        left, runs = self.budget, []
        for text in list(self.running):  # those under way first, the oldest before the others
            if text not in self.running:
                continue  # it gave way in this very step
            count = min(text.tokens - text.computed, left)
            while count and not self.make_room(text, count):
                victim = self.running.pop()  # the newest: the oldest always goes on
                self.free, victim.blocks, victim.computed = self.free + victim.blocks, 0, 0
                self.waiting.appendleft(victim)
                if victim is text:
                    count = 0
            if count:
                runs.append((text, count))
                left -= count
        while left and self.waiting and len(self.running) < self.seats:
            text = self.waiting[0]
            count = min(text.tokens - text.computed, left)
            if not self.make_room(text, count, spare=1 if self.running else 0):
                break  # nobody overtakes
            self.running.append(self.waiting.popleft())
            runs.append((text, count))
            left -= count
        return runs

    def make_room(self, text, count, spare=0):
        more = -(-(text.computed + count) // self.block_size) - text.blocks
        if more + (spare if more else 0) > self.free:
            return False
        self.free, text.blocks = self.free - more, text.blocks + more
        return True

    def update(self, runs):
        for text, count in runs:
            text.computed += count
            if text.computed == text.tokens:  # all known tokens are computed: a new one is drawn
                text.tokens += 1
                if text.tokens - text.prompt == text.answer:
                    self.running.remove(text)
                    self.free += text.blocks


# %% [markdown]
# ## Six texts
#
# Prompts of 3 to 40 tokens, in steps of at most 16. A long prompt is read in parts, beside the
# writing of others.

# %%
WORK = [("a", 5, 6), ("b", 40, 4), ("c", 3, 8), ("d", 12, 3), ("e", 9, 5), ("f", 20, 2)]
LIMITS = {"num_blocks": 100, "block_size": 4, "budget": 16, "seats": 4}

small = SmallScheduler(**LIMITS)
small.waiting.extend(Text(*work) for work in WORK)
steps = []
while small.waiting or small.running:
    runs = small.schedule()
    steps.append([(text.name, count) for text, count in runs])
    small.update(runs)

for number, step in enumerate(steps):
    print(f"step {number:2}: " + ", ".join(f"{name} {count}" for name, count in step))

# %% [markdown]
# ## The real one
#
# `tilewise.engine` has the same idea with all that a server needs: prefixes found again, forks,
# beams, swapping, priorities, deadlines, steps ahead. Without these it does, step by step, the
# same:

# %%
from tilewise import SamplingParams
from tilewise.engine.batch import SampledToken
from tilewise.engine.request import Request
from tilewise.engine.scheduling.scheduler import Scheduler


def real_steps(work, num_blocks, block_size, budget, seats):
    scheduler = Scheduler(
        num_blocks, block_size, max_num_seqs=seats, max_num_batched_tokens=budget,
        max_model_len=64, enable_prefix_caching=False, preemption="recompute",
    )  # fmt: skip
    names = {}
    for number, (name, prompt, answer) in enumerate(work):
        ids = [1000 * number + i for i in range(prompt)]  # no two alike
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        scheduler.add(Request(name, ids, params))
        names[scheduler.sequences(name)[0].seq_id] = name
    found = []
    while (batch := scheduler.schedule()) is not None:
        found.append([(names[run.seq_id], len(run.token_ids)) for run in batch.sequences])
        drawn = [[SampledToken(7)] * run.num_samples for run in batch.sequences]
        scheduler.update(batch, drawn)
    scheduler.check_integrity()
    return found, scheduler.stats()


real, stats = real_steps(WORK, **LIMITS)
assert real == steps
print(f"{len(real)} steps, the same {sum(map(len, real))} runs of tokens")

# %% [markdown]
# ## Too little memory
#
# With few blocks somebody must give his back and be computed again later. It is the newest: the
# oldest always goes on, so that every text ends.

# %%
tight = LIMITS | {"num_blocks": 12}
real, stats = real_steps(WORK, **tight)
for number, step in enumerate(real):
    print(f"step {number:2}: " + ", ".join(f"{name} {count}" for name, count in step))
print("texts that gave way:", stats.num_preemptions)
assert stats.num_preemptions > 0

# %% [markdown]
# ## The same by the real engine
#
# What a text says does not depend on who else was in its steps. The packaged model writes six
# texts at once and each alone:

# %%
from tilewise import LLM

llm = LLM("story", device="cpu", num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
params = SamplingParams(max_tokens=12, temperature=0)
prompts = ["Once upon a time", "The dragon", "A rabbit and a fox went", "It was", "He", "She said"]
together = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
llm.close()
assert together == alone
print("the same tokens, together and alone")
