"""FLOPs, bytes and collectives counted from optimised programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockrank.costs.hlo import Program

LAYERS, TOKENS, WIDTH, INNER = 5, 24, 16, 40
PRODUCTS = LAYERS * 2 * TOKENS * WIDTH * INNER * 2
"""FLOPs of `LAYERS` times two products."""


def block(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    up, down = weights
    return x + jax.nn.silu(x @ up) @ down


def scanned(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0]


def unrolled(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return x


def program(function, *arguments) -> Program:
    return Program(jax.jit(function).lower(*arguments).compile().as_text())


ARGUMENTS = (
    jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32),
    (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, INNER), jnp.float32),
        jax.ShapeDtypeStruct((LAYERS, INNER, WIDTH), jnp.float32),
    ),
)


def test_a_scanned_and_an_unrolled_program_have_the_same_flops() -> None:
    loop = program(scanned, *ARGUMENTS)
    assert [count for _, count in loop.loops()] == [LAYERS]
    assert loop.costs.flops == program(unrolled, *ARGUMENTS).costs.flops == PRODUCTS


def test_the_backward_pass_of_a_scan_is_counted_too() -> None:
    def loss(function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), argnums=(0, 1))

    assert program(loss(scanned), *ARGUMENTS).costs.flops == 3 * PRODUCTS
    assert program(loss(unrolled), *ARGUMENTS).costs.flops == 3 * PRODUCTS


def test_a_slice_of_stacked_weights_moves_only_itself() -> None:
    weights = 4 * LAYERS * 2 * WIDTH * INNER
    one = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
    moved = program(scanned, one, ARGUMENTS[1]).costs.bytes
    assert weights < moved < 4 * weights


TEXT = """HloModule text, entry_computation_layout={()->f32[4]{0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%cond (p: (s32[], f32[8,16])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%inner (x.1: f32[8,16], w.1: f32[16,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %w.1 = f32[16,16]{1,0:T(8,128)} parameter(1)
  ROOT %convolution.1 = f32[8,16]{1,0:T(8,128)} convolution(%x.1, %w.1), dim_labels=bf_io->bf
}

%body (q: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %q = (s32[], f32[8,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%q), index=1
  %w = f32[16,16]{1,0} constant({...})
  %fusion = f32[8,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%inner
  %all-reduce-start = f32[8,16]{1,0} all-reduce-start(%fusion), replica_groups={{0,1}}, to_apply=%sum
  %all-reduce-done = f32[8,16]{1,0} all-reduce-done(%all-reduce-start)
  %one = s32[] constant(1)
  %k = s32[] add(%j, %one)
  ROOT %next = (s32[], f32[8,16]{1,0}) tuple(%k, %all-reduce-done)
}

ENTRY %main (z: f32[8,16]) -> f32[8,16] {
  %z = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,16]{1,0}) tuple(%zero, %z)
  %while = (s32[], f32[8,16]{1,0}) while(%start), condition=%cond, body=%body
  %result = f32[8,16]{1,0} get-tuple-element(%while), index=1
  %kernel = f32[8,16]{1,0} custom-call(%result), backend_config={"cost_estimate":{"flops":"1000"}}
  ROOT %gathered = f32[16,16]{1,0} all-gather(%kernel), dimensions={0}
}
"""


def test_tpu_products_kernels_and_collectives() -> None:
    costs = Program(TEXT).costs
    assert costs.flops == 7 * 2 * 8 * 16 * 16 + 1000
    assert costs.collectives == {"all-reduce": 7, "all-gather": 1}
    assert costs.collective_bytes == {"all-reduce": 7 * 8 * 16 * 4, "all-gather": 16 * 16 * 4}


NESTED = """HloModule nested

%slice (s.1: f32[6,8,16], i.1: s32[]) -> f32[8,16] {
  %s.1 = f32[6,8,16]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %piece = f32[1,8,16]{2,1,0} dynamic-slice(%s.1, %i.1, %zero.1, %zero.1), dynamic_slice_sizes={1,8,16}
  ROOT %flat = f32[8,16]{1,0} bitcast(%piece)
}

%product (x.1: f32[4,8], i.2: s32[], s.2: f32[6,8,16]) -> f32[4,16] {
  %x.1 = f32[4,8]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %s.2 = f32[6,8,16]{2,1,0} parameter(2)
  %weights = f32[8,16]{1,0} fusion(%s.2, %i.2), kind=kLoop, calls=%slice
  ROOT %convolution.1 = f32[4,16]{1,0} convolution(%x.1, %weights), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[4,8], i: s32[], s: f32[6,8,16]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[6,8,16]{2,1,0} parameter(2)
  ROOT %fusion = f32[4,16]{1,0} fusion(%x, %i, /*index=2*/%s), kind=kOutput, calls=%product
}
"""


def test_a_slice_inside_a_fusion_inside_a_fusion_moves_only_itself() -> None:
    costs = Program(NESTED).costs
    assert costs.flops == 2 * 4 * 8 * 16
    assert costs.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16) + 4


def test_a_slice_of_an_aliased_view_moves_only_itself() -> None:
    """As TPUs read a layer of stacked int8 kernels: the stack is seen in other tiles, and one slice of it read."""
    view = """
%retile (v: f32[6,8,16]) -> f32[6,8,16] {
  %v = f32[6,8,16]{2,1,0} parameter(0)
  ROOT %copied = f32[6,8,16]{2,1,0} copy(%v)
}
"""
    call = (
        "%viewed = f32[6,8,16]{2,1,0} fusion(%s.1), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retile"
    )
    text = NESTED.replace("HloModule nested\n", "HloModule nested\n" + view)
    text = text.replace("  %piece =", f"  {call}\n  %piece =").replace("dynamic-slice(%s.1,", "dynamic-slice(%viewed,")
    assert Program(text).costs.bytes == Program(NESTED).costs.bytes


IN_VMEM = """HloModule vmem

%add (x.1: f32[8,16], y.1: f32[8,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %y.1 = f32[8,16]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %add.1 = f32[8,16]{1,0:T(8,128)S(1)} add(%x.1, %y.1)
}

ENTRY %main (x: f32[8,16], w: f32[4,8,16], i: s32[]) -> f32[8,16] {
  %x = f32[8,16]{1,0:T(8,128)} parameter(0)
  %w = f32[4,8,16]{2,1,0:T(8,128)} parameter(1)
  %i = s32[] parameter(2)
  %copy-start = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = f32[8,16]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %sum = f32[8,16]{1,0:T(8,128)S(1)} fusion(%x, %copy-done), kind=kLoop, calls=%add
  %piece = f32[1,8,16]{2,1,0:T(8,128)S(1)} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,8,16}
  %flat = f32[8,16]{1,0:T(8,128)S(1)} bitcast(%piece)
  %slice-start = ((f32[4,8,16]{2,1,0}), f32[1,8,16]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) slice-start(%w), slice={[0:1]}
  %slice-done = f32[1,8,16]{2,1,0:T(8,128)S(1)} slice-done(%slice-start)
  %product = f32[8,16]{1,0:T(8,128)S(1)} multiply(%sum, %flat)
  ROOT %out = f32[8,16]{1,0:T(8,128)} copy(%product)
}
"""


SCATTERED = """HloModule step

%all-reduce-scatter.9 (input.9: f32[256,512]) -> f32[64,512] {
  %input.9 = f32[256,512]{1,0} parameter(0)
  %all-reduce.94 = f32[256,512]{1,0} all-reduce(%input.9), replica_groups={{0,1,2,3}}, to_apply=%add
  %partition-id.30 = u32[] partition-id()
  %constant.1 = u32[] constant(64)
  %multiply.2 = u32[] multiply(%partition-id.30, %constant.1)
  %constant.2 = u32[] constant(0)
  ROOT %slice = f32[64,512]{1,0} dynamic-slice(%all-reduce.94, %multiply.2, %constant.2), dynamic_slice_sizes={64,512}
}

ENTRY %main (p: f32[256,512]) -> f32[64,512] {
  %p = f32[256,512]{1,0} parameter(0)
  ROOT %fusion.21 = f32[64,512]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.9
}
"""


def test_a_reduce_scatter_of_a_tpu_is_told_from_an_all_reduce() -> None:
    costs = Program(SCATTERED).costs
    assert costs.collectives == {"reduce-scatter": 1}
    assert costs.collective_bytes == {"reduce-scatter": 4 * 256 * 512}


def test_what_lies_in_vmem_is_not_moved() -> None:
    """To and from main memory: x twice, two slices of w, the result."""
    assert Program(IN_VMEM).costs.bytes == 4 * (5 * 8 * 16)


@pytest.mark.parametrize(
    ("start", "limit", "step", "runs"),
    [(0, 7, 2, 4), (0, 8, 2, 4), (1, 7, 2, 3), (3, 7, 1, 4), (7, 7, 1, 0), (0, 4, 4, 1)],
)
def test_a_loop_runs_by_its_steps(start: int, limit: int, step: int, runs: int) -> None:
    """XLA unrolls the loops in which it sends a matrix piece by piece while it multiplies: two pieces a turn."""
    text = TEXT.replace("zero = s32[] constant(0)", f"zero = s32[] constant({start})")
    text = text.replace("constant(7)", f"constant({limit})").replace(
        "one = s32[] constant(1)", f"one = s32[] constant({step})"
    )
    costs = Program(text).costs
    assert costs.flops == runs * 2 * 8 * 16 * 16 + 1000
    assert costs.collectives["all-reduce"] == runs


def test_a_counter_is_followed_through_copies_and_sums() -> None:
    twice = "  %copied = s32[]{:T(128)S(6)} copy(%j)\n  %k0 = s32[] add(%copied, %one)\n  %k = s32[] add(%one, %k0)"
    assert Program(TEXT.replace("  %k = s32[] add(%j, %one)", twice)).costs.collectives["all-reduce"] == 4


@pytest.mark.parametrize(
    ("told", "untold"),
    [
        ("constant(7)", "parameter(1)"),
        ("add(%j, %one)", "multiply(%j, %one)"),
        ("one = s32[] constant(1)", "one = s32[] constant(0)"),
        ("direction=LT", "direction=NE"),
        ("tuple(%zero, %z)", "tuple(%unknown, %z)"),
    ],
)
def test_a_loop_that_does_not_tell_is_an_error(told: str, untold: str) -> None:
    with pytest.raises(ValueError, match="while: no trip count"):
        _ = Program(TEXT.replace(told, untold)).costs


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 9, 3), (4, 3, 5)), {"window_strides": (1,), "padding": "VALID"}),
        (((2, 9, 3), (4, 3, 5)), {"window_strides": (2,), "padding": "SAME"}),
        (((2, 9, 3), (3, 3, 5)), {"window_strides": (1,), "padding": ((2, 2),), "lhs_dilation": (2,)}),
        (((2, 9, 4), (3, 2, 6)), {"window_strides": (1,), "padding": "SAME", "feature_group_count": 2}),
    ],
)
def test_convolutions_count_the_products_they_have(shapes, options) -> None:
    """Against counting with ones: an output of ones is the number of products that went into it."""

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=("NWC", "WIO", "NWC"), **options)

    lowered = jax.jit(convolve).lower(*(jnp.ones(shape) for shape in shapes))
    text = lowered.as_text(dialect="hlo")
    total = float(np.asarray(convolve(*(jnp.ones(shape) for shape in shapes))).sum())
    assert Program(text).costs.flops == 2 * total
