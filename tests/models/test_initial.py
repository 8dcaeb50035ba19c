"""The numbers of first parameters: known answers are `jax.random.normal` and NumPy's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.models import layers


@pytest.fixture
def on_a_mesh(monkeypatch):
    monkeypatch.setattr(layers, "is_divided", lambda: True)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1, 3), (3, 11, 17)])
def test_pieces_on_a_mesh_are_those_of_one_long_array(on_a_mesh, shape):
    key, size = jax.random.key(7), int(np.prod(shape))
    wanted = jax.random.normal(key, (2000,))[123 : 123 + size].reshape(shape)
    piece_of = jax.jit(lambda key: layers._normal_numbers(key, 2000)(123, shape))
    np.testing.assert_array_equal(piece_of(key), wanted)
    assert "f32[2000]" not in str(jax.make_jaxpr(piece_of)(key))  # the long array is not there


def test_keys_of_another_generator_draw_one_long_array(on_a_mesh):
    """Their numbers depend on the size of the array."""
    key = jax.random.key(7, impl="rbg")
    wanted = jax.random.normal(key, (2000,))[123:144].reshape(3, 7)
    np.testing.assert_array_equal(layers._normal_numbers(key, 2000)(123, (3, 7)), wanted)


@pytest.mark.parametrize("start", [0, 2**16 - 3, 2**32 - 5, 2**33 + 9])
@pytest.mark.parametrize("shape", [(3, 7), (4, 5, 6)])
def test_positions_have_64_bits(start, shape):
    high, low = map(np.asarray, layers._positions(*map(jnp.uint32, divmod(start, 2**32)), shape))
    found = (high.astype(np.uint64) << np.uint64(32)) + low
    wanted = start + np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("place", [(69_999, 65_535, 65_536), (3, 5, 7), (65_536, 1, 0)])
def test_parameters_may_have_more_than_2_to_the_32_elements(place):
    shape, start = (70_000, 65_536, 65_537), 2**33 - 1
    halves = map(jnp.uint32, divmod(start, 2**32))
    high, low = jax.jit(lambda a, b: [x[place] for x in layers._positions(a, b, shape)])(*halves)
    assert (int(high) << 32) + int(low) == start + int(np.ravel_multi_index(place, shape))
