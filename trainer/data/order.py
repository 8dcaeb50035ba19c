"""The random order of examples, a pure function of seed and epoch; and the parts of batches.

`permutation` orders data sets in memory, and `examples_at` long streams.
"""

import functools
import math

import numpy as np

_ROUNDS = 8


def process_rows(
    batch_size: int, name: str, rank: int | None = None, size: int | None = None
) -> slice:
    """Returns the rows of part `rank` of `size` of a batch, None for this process's; ValueError.

    >>> process_rows(12, "data.mine", rank=1, size=3)
    slice(4, 8, None)
    """
    parts = "parts"
    if rank is None and size is None:
        import jax  # only here: a part that is given is a function of the arguments

        rank, size, parts = jax.process_index(), jax.process_count(), "processes"
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(
            f"{name} got rank={rank} and size={size}. Give both, for part `rank` of `size` parts "
            "of each batch, counted from 0; or neither, for the part of this process."
        )
    if batch_size % size:
        raise ValueError(
            f"{name} divides a batch among {size} {parts}, but the batch size is "
            f"{batch_size}. Choose a multiple of {size}."
        )
    shard = batch_size // size
    return slice(rank * shard, (rank + 1) * shard)


def random_words(seed: int, number: int, purpose: int, count: int) -> np.ndarray:
    """Returns `count` random words, uint64, as a pure function of the other arguments."""
    # The words are the raw output of Philox4x64-10, which no version of numpy may change. The seed
    # may be any integer; `number` is an epoch or a batch index, from 0; `purpose` distinguishes
    # independent uses of one seed and number.
    key = np.array([seed % 2**64, number], np.uint64)
    # Philox counts in the first word, so that purposes never share a counter. Purpose 0 is the
    # order, 1 are crops and flips, 2 is the choice of the validation split (examples or documents).
    return np.random.Philox(key=key, counter=[0, 0, 0, purpose]).random_raw(count)


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the indices of the examples in the order of an epoch, int [size]."""
    words = random_words(seed, epoch, 0, size)
    order = np.argsort(words)  # a third of the time of a stable sort
    ordered = words[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(words, kind="stable")  # the order of equal words is defined only here
    return order


def examples_at(seed: int, start: int, count: int, size: int) -> np.ndarray:
    """Returns the examples at places of the training stream, int64 [count]."""
    # The stream is one random order of `size` examples per epoch. `permutation` holds the order of
    # a whole epoch, which would take seconds and 160 MB for 10 million examples.
    found = np.empty(count, np.int64)
    done = 0
    while done < count:
        epoch, offset = divmod(start + done, size)
        end = min(count, done + size - offset)
        found[done:end] = shuffled(seed, epoch, np.arange(offset, offset + end - done), size)
        done = end
    return found


def shuffled(seed: int, epoch: int, positions: np.ndarray, size: int) -> np.ndarray:
    """Returns the examples at positions of an epoch's random order, int64 like `positions`."""
    # The order is a generalized Feistel network with cycle walking (Black and Rogaway, "Ciphers
    # with Arbitrary Finite Domains", 2002): a number is a pair (x, y) of digits, and each round
    # adds to one a hash of the other. Numbers that leave the range go through it once more.
    # Different positions have different examples.
    found = np.asarray(positions, np.uint64).copy()
    # As square as possible: at most a share of 1/sqrt(size) of the pairs is out of the range.
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    moduli = np.uint64(rows), np.uint64(columns)
    walking = np.ones(found.shape, bool)
    while walking.any():
        x, y = np.divmod(found[walking], moduli[1])
        for number, key in enumerate(_cached_words(seed, epoch, 0, _ROUNDS)):
            # The roles change every round; a sum modulo the size of a digit can be undone.
            modulus = moduli[number % 2]
            x, y = y, (x + _hash(y ^ key) % modulus) % modulus
        found[walking] = x * moduli[1] + y
        walking = found >= size
    return found.astype(np.int64)


_cached_words = functools.lru_cache(maxsize=8)(random_words)


def _hash(words: np.ndarray) -> np.ndarray:
    """Mixes the bits of words, as the end of SplitMix64 (Steele, Lea and Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
