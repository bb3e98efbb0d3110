"""The term that the backward pass subtracts from the gradients of a row's probabilities.

What      delta = rowsum(do * o) - dlse, laid out like lse.
Grid      one task per `rows_per_task` queries of a sequence, taken from a counter.
One task  a dot product of two rows in memory for each query and head.
Traffic   do and o once.
Numerics  sums in float32 (float64 for float64). A row's bits depend on nothing but the row.
"""

from __future__ import annotations

from tilewise.kernels.cpu.attention.problem import DO, LSE, Q_LEN, O
from tilewise.kernels.cpu.machine.rows import dot_rows
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task


@inner
def delta_of_rows(call, task):
    """Replace dlse in call.delta by delta = rowsum(do * o) - dlse, in place, for the queries of one
    task and all their heads; `call` is a `Backward`."""
    sizes, grads, delta = call.sizes, call.grads, call.delta
    like, starts = call.arrays.like, call.arrays.starts
    sequence, rows = 0, grads.rows_per_task
    while task >= (starts[sequence, Q_LEN] + rows - 1) // rows:
        task -= (starts[sequence, Q_LEN] + rows - 1) // rows
        sequence += 1
    for query in range(task * rows, min((task + 1) * rows, starts[sequence, Q_LEN])):
        for head in range(sizes.num_kv_heads * sizes.group):
            at = starts[sequence, LSE] + head * sizes.lse_head + query
            do = starts[sequence, DO] + query * grads.do_row + head * grads.do_head
            o = starts[sequence, O] + query * sizes.o_row + head * sizes.o_head
            delta[at] = dot_rows(like, sizes.q_code, do, o, sizes.v_head_dim) - delta[at]


@kernel
def delta_kernel(call, counter, num_tasks):
    """Take tasks of rows from `counter` until none of num_tasks is left, and replace dlse by delta
    for each, see `delta_of_rows`; `call` is a `Backward`."""
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        delta_of_rows(call, task)
