"""Programs of optimizers that their authors published, restated in NumPy float64.

They work on one matrix at a time, with loops and plain `if`s, as the papers and the authors'
programs do, and import nothing of Lockstep. Those of SOAP, Distributed Shampoo, MARS, Scion,
Grams, AdEMAMix, ADOPT, LaProp, PSGD and Adam of modded-nanogpt were also run beside the authors'
own programs. The tests and the tables of `tests/references.py` share them.

Unless said otherwise, a function takes the first parameters, the gradients [steps, *shape] and the
hyperparameters, and yields the parameters after every step. A learning rate is a number, or has one
for each step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def steps_of(grads: Any, rate: Any) -> Any:
    """Yields the number of each step, from 1, its gradient and its learning rate."""
    rates = np.broadcast_to(rate, len(grads))
    return zip(range(1, len(grads) + 1), grads, rates, strict=True)


def adam_steps(grads, rate, b1, b2, eps):
    """Yields the gradient of each step, its learning rate and the direction of Adam."""
    m = v = np.zeros_like(grads[0])
    for t, g, lr in steps_of(grads, rate):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        yield g, lr, m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


# ---- SOAP: Vyas et al. 2024, algorithm 3, and the order of events of the authors' program


def soap_by_the_paper(
    start, grads, rate, b1, b2, beta, eps, decay, every, bases: Any = None, after=False
):
    """The program of its authors decays the weight `after` its step, and not with it."""
    w = start.copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    left, right = np.zeros((len(w),) * 2), np.zeros((w.shape[1],) * 2)
    for step, g, lr in steps_of(grads, rate):
        t = step - 1
        if t > 0:  # the authors skip the first step, weight decay and all
            ql, qr = bases
            turned = ql.T @ g @ qr
            m = b1 * m + (1 - b1) * turned
            v = b2 * v + (1 - b2) * turned**2
            size = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
            old, w = w, w - size * ql @ (m / (np.sqrt(v) + eps)) @ qr.T
            w = w - lr * decay * (w if after else old)
        left = beta * left + (1 - beta) * g @ g.T
        right = beta * right + (1 - beta) * g.T @ g
        if t == 0 and bases is None:
            bases = [np.linalg.eigh(x)[1][:, ::-1] for x in (left, right)]
        elif t > 0 and t % every == 0:
            m = bases[0] @ m @ bases[1].T
            orders = [
                np.argsort(-np.diag(q.T @ x @ q)) for q, x in zip(bases, (left, right), strict=True)
            ]
            v = v[orders[0]][:, orders[1]]
            bases = [
                np.linalg.qr(x @ q[:, order])[0]
                for q, x, order in zip(bases, (left, right), orders, strict=True)
            ]
            m = bases[0].T @ m @ bases[1]
        yield w


# ---- Shampoo: Shi et al. 2023, with eigendecompositions and Adam's grafting


def shampoo_by_the_paper(start, grads, rate, b1, b2, eps, decay, every, begin, sides="lr"):
    w = start.copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    left, right = np.zeros((len(w),) * 2), np.zeros((w.shape[1],) * 2)
    roots = [np.eye(len(w)), np.eye(w.shape[1])]

    def inverse_root(x):
        values, vectors = np.linalg.eigh(x + eps * np.eye(len(x)))
        return vectors @ np.diag(values ** (-0.5 / len(sides))) @ vectors.T

    for t, g, lr in steps_of(grads, rate):
        m = b1 * m + (1 - b1) * g
        # Meta's program: "1 - beta2 if beta2 != 1.0 else 1.0", and then no correction of the bias.
        part, real = (1 - b2, 1 - b2**t) if b2 != 1 else (1, 1)
        v = b2 * v + part * g**2
        left = b2 * left + part * g @ g.T
        right = b2 * right + part * g.T @ g
        if t == begin or (t > begin and t % every == 0):
            if "l" in sides:
                roots[0] = inverse_root(left / real)
            if "r" in sides:
                roots[1] = inverse_root(right / real)
        mean = m / (1 - b1**t)
        direction = adam = mean / (np.sqrt(v / real) + 1e-8)
        if t >= begin:
            direction = roots[0] @ mean @ roots[1]
            direction = direction * np.linalg.norm(adam) / np.linalg.norm(direction)
        w = w - lr * (direction + decay * w)
        yield w


# ---- MARS: Yuan et al. 2024, algorithm 2 (MARS-AdamW), approximate


def mars_by_the_paper(start, grads, rate, b1, b2, gamma, eps, decay):
    w = start.copy()
    m, v, last = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, g, lr in steps_of(grads, rate):
        c = g + gamma * b1 / (1 - b1) * (g - last)
        if np.linalg.norm(c) > 1:
            c = c / np.linalg.norm(c)
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c**2
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        w, last = w - lr * (step + decay * w), g
        yield w


# ---- Scion: Pethick et al. 2025, algorithms 1 and 2, with the norms of tables 2 and 4


def farthest_point(m, norm):
    """The paper's maps for a matrix [outputs, inputs]; the last for a vector."""
    if norm == "bias_rms":
        return m / np.sqrt(np.mean(m**2))
    outputs, inputs = m.shape
    if norm == "spectral":
        u, s, v = np.linalg.svd(m, full_matrices=False)
        s = s / np.linalg.norm(m)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return np.sqrt(outputs / inputs) * (u * s) @ v
    if norm == "sign":
        return np.sign(m) / inputs
    if norm == "col_norm":
        return np.sqrt(outputs) * m / np.linalg.norm(m, axis=0, keepdims=True)
    return m / np.linalg.norm(m, axis=1, keepdims=True) / np.sqrt(inputs)


def scion_by_the_paper(start, grads, rate, radius, alpha, norm, constrained):
    w, m = start.copy(), np.zeros_like(start)
    for _, g, lr in steps_of(grads, rate):
        m = (1 - alpha) * m + alpha * g
        vertex = -radius * farthest_point(m.T, norm).T
        w = (1 - lr) * w + lr * vertex if constrained else w + lr * vertex
        yield w


# ---- Masks: Liang et al. 2024 and Cao et al. 2024


def masked_adamw_by_the_paper(start, grads, rate, b1, b2, eps, decay, mask):
    """The weight decay is a number, too, or has one for each step."""
    w, decays = start.copy(), np.broadcast_to(decay, len(grads))
    for (g, lr, u), decay in zip(adam_steps(grads, rate, b1, b2, eps), decays, strict=True):
        w = w - lr * decay * w - lr * mask(u, g)
        yield w


def cautious_mask(u, g):
    mask = (u * g > 0).astype(float)
    return u * mask / max(mask.mean(), 1e-3)


def grams_mask(u, g):
    return np.sign(g) * np.abs(u)


def cautious_mask_of_lion(u, g):
    """The authors' mask for Lion: kept elements are multiplied by n / (k + 1)."""
    kept = u * g > 0
    return u * kept * (kept.size / (kept.sum() + 1))


def cautious_lion(start, grads, rate, b1, b2, decay=0.0, mask=cautious_mask):
    w, m = start.copy(), np.zeros_like(start)
    for _, g, lr in steps_of(grads, rate):
        step = mask(np.sign(b1 * m + (1 - b1) * g), g)
        w = w - lr * decay * w - lr * step
        m = b2 * m + (1 - b2) * g
        yield w


# ---- LAMB: You et al. 2020, algorithm 2, with corrected moments and phi(x) = x


def lamb_by_the_paper(start, grads, rate, b1, b2, eps, decay):
    w = start.copy()
    for _, lr, u in adam_steps(grads, rate, b1, b2, eps):
        step = u + decay * w
        w = w - lr * np.linalg.norm(w) / np.linalg.norm(step) * step
        yield w


# ---- LARS: You et al. 2017, algorithm 1: the learning rate is inside of the momentum


def lars_by_the_paper(start, grads, rate, trust, momentum, decay):
    w, m = start.copy(), np.zeros_like(start)
    for _, g, lr in steps_of(grads, rate):
        local = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
        m = momentum * m + lr * local * (g + decay * w)
        w = w - m
        yield w


# ---- Adan: Xie et al. 2022, algorithm 1, with the decays of their program, 1 minus the paper's


def adan_by_the_paper(start, grads, rate, b1, b2, b3, eps, decay):
    w, m, v, n = start.copy(), *(np.zeros_like(start) for _ in range(3))
    last = grads[0]
    for t, g, lr in steps_of(grads, rate):
        change, last = g - last, g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * change
        n = b3 * n + (1 - b3) * (g + b2 * change) ** 2
        step = m / (1 - b1**t) + b2 * v / (1 - b2**t)
        w = (w - lr * step / (np.sqrt(n / (1 - b3**t)) + eps)) / (1 + lr * decay)
        yield w


# ---- ADOPT: Taniguchi et al. 2024, algorithm 2: the first gradient only begins the second moment


def adopt_by_the_paper(start, grads, rate, b1, b2, eps):
    w, m, v = start.copy(), np.zeros_like(start), grads[0] ** 2
    yield w
    rates = np.broadcast_to(rate, len(grads))
    for t, g, lr in steps_of(grads[1:], rates[1:]):
        clip = t**0.25
        m = b1 * m + (1 - b1) * np.clip(g / np.maximum(np.sqrt(v), eps), -clip, clip)
        w = w - lr * m
        v = b2 * v + (1 - b2) * g**2
        yield w


# ---- Adam of modded-nanogpt's record 46 of the optimizer track: without correction of the bias


def uncorrected_adam_of_modded_nanogpt(start, grads, rate, b1, b2, eps):
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for _, g, lr in steps_of(grads, rate):
        m = m + (1 - b1) * (g - m)
        v = v + (1 - b2) * (g**2 - v)
        w = w - lr * m / (np.sqrt(v) + eps)
        yield w


# ---- LaProp: Ziyin et al. 2020, their program: the learning rate is inside of the momentum


def laprop_by_the_authors(start, grads, rate, b1, b2, eps):
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    weight, real = 0.0, 0.0
    for _, g, lr in steps_of(grads, rate):
        v = b2 * v + (1 - b2) * g**2
        weight = b1 * weight + (1 - b1) * lr
        real = b2 * real + (1 - b2)
        m = b1 * m + (1 - b1) * lr * g / (np.sqrt(v / real) + eps)
        w = w - m / (weight / lr)
        yield w


# ---- AdEMAMix: Pagliardini et al. 2024, the authors' program for optax, whose steps begin at 0


def ademamix_by_the_authors(start, grads, rate, b1, b2, b3, alpha, eps, decay, warm_up):
    w = start.copy()
    fast, slow, v = (np.zeros_like(start) for _ in range(3))

    def half_life(decay):
        return np.log(0.5) / np.log(decay) - 1

    for t, g, lr in steps_of(grads, rate):
        x = (t - 1) / warm_up
        keep, mix = b3, alpha
        if x < 1:
            keep = 0.5 ** (1 / ((1 - x) * half_life(b1) + x * half_life(b3) + 1))
            mix = x * alpha
        fast = b1 * fast + (1 - b1) * g
        slow = keep * slow + (1 - keep) * g
        v = b2 * v + (1 - b2) * g**2
        step = (fast / (1 - b1**t) + mix * slow) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * (step + decay * w)
        yield w


# ---- AdamC: Defazio 2025, algorithm 2, for a weight that a normalization follows


def adamc_by_the_paper(start, grads, rate, b1, b2, eps, decay):
    w = start.copy()
    for _, lr, u in adam_steps(grads, rate, b1, b2, eps):
        w = w - lr * (u + decay * lr / np.max(rate) * w)
        yield w


# ---- PSGD-Kron with Hyperball, of modded-nanogpt's optimizer track, on matrices [outputs, inputs]


def psgd_step(old, t, g, lr, z, noise, beta=0.95, precond_lr=1.0, init_scale=None, raw=False):
    """Makes step t, from 1, of (weights, mean, q0, q1); z and noise are its random matrices.

    With `raw`, the factors are fitted to the gradient in place of the mean.
    """
    w, m, q0, q1 = old
    m = beta * m + (1 - beta) * g
    mean = m / (1 - beta**t)
    if t == 1:
        scale = init_scale or max(np.mean(g**4), 1e-24) ** (-1 / 32)
        q0, q1 = (scale * np.eye(size) for size in g.shape)
    ratio = np.sqrt(np.abs(q1).max() / np.abs(q0).max())
    q0, q1 = q0 * ratio, q1 / ratio
    x = g if raw else mean
    a = q0 @ (x + np.finfo(float).eps * np.abs(x) * noise) @ q1.T
    b = np.linalg.inv(q0).T @ z @ np.linalg.inv(q1)
    norms = [_largest_eigenvalue(a @ a.T + b @ b.T), _largest_eigenvalue(a.T @ a + b.T @ b)]
    q0 = q0 - precond_lr / norms[0] * np.triu(a @ a.T - b @ b.T) @ q0
    q1 = q1 - precond_lr / norms[1] * np.triu(a.T @ a - b.T @ b) @ q1
    u = (q0.T @ q0) @ mean @ (q1.T @ q1)
    new = w - lr * u * (np.linalg.norm(w) / (np.linalg.norm(u) + 1e-10))
    return new / (np.linalg.norm(new) + 1e-10) * np.linalg.norm(w), m, q0, q1


def _largest_eigenvalue(a):
    """Estimates it as the program does."""
    scale = np.abs(a).max()
    a = a / scale
    x = a @ a[:, np.argmax((a * a).sum(axis=0))]
    return scale * np.linalg.norm(a @ (x / np.linalg.norm(x)))


def psgd_by_modded_nanogpt(start, grads, rate, draws, **options):
    """Restates PSGDKron of train_psgd.py for one matrix; `draws` has (z, noise) for each step.

    Returns the state of `psgd_step` after every step.
    """
    state, seen = (start, np.zeros_like(start), None, None), []
    for (t, g, lr), draw in zip(steps_of(grads, rate), draws, strict=True):
        state = psgd_step(state, t, g, lr, *draw, **options)
        seen.append(state)
    return seen


# ---- Muon and Scion on torch's layouts: they yield the updates of every step


def newton_schulz(g):
    """zeropower_via_newtonschulz5 of both programs, without the cast to bfloat16."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def keller_jordan(grads, momentum=0.95, rate=0.02):
    """Muon's update of torch parameters: [out, in], or [out, in, height, width]."""
    m = np.zeros_like(grads[0])
    for _, g, lr in steps_of(grads, rate):
        m = momentum * m + (1 - momentum) * g
        update = (1 - momentum) * g + momentum * m
        update = newton_schulz(update.reshape(len(update), -1)).reshape(g.shape)
        yield -lr * max(1, g.shape[-2] / g.shape[-1]) ** 0.5 * update


def spectral_conv(grads, momentum=0.1, rate=0.02, scale=3.0):
    """Unconstrained Scion with the norm SpectralConv, [out, in, k] or [out, in, k, k]."""
    m = np.zeros_like(grads[0])
    for _, g, lr in steps_of(grads, rate):
        m = (1 - momentum) * m + momentum * g
        update = newton_schulz(m.reshape(len(m), -1)).reshape(g.shape)
        positions = g.shape[2] ** (g.ndim - 2)
        yield -lr * scale * (g.shape[0] / g.shape[1]) ** 0.5 / positions * update


def to_flax(x):
    """[out, in, *window] -> [*window, in, out]."""
    return np.moveaxis(x, (0, 1), (-1, -2))


# ---- How a program and an optimizer are compared


def train(tx: Any, start: Any, grads: Any) -> Any:
    """Trains an optax optimizer in float64.

    Args:
        tx: an optax transformation.
        start: a tree of arrays, the first parameters.
        grads: a sequence of such trees, a step each.

    Returns:
        The tree with the parameters after every step, [steps, *shape].
    """
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, start)
        state, update, seen = tx.init(params), jax.jit(tx.update), []
        for g in grads:
            updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
            params = optax.apply_updates(params, updates)
            seen.append(params)
        return jax.tree.map(lambda *steps: np.stack([np.asarray(x) for x in steps]), *seen)


def relative_difference(ours: Any, theirs: Any) -> float:
    """Finds the largest difference of two trees of arrays [steps, *shape].

    Each array's difference is relative to the largest number in the array, over all steps; the
    largest of all arrays is returned. NaN anywhere gives NaN.
    """

    def one(mine: Any, other: Any) -> Any:
        if other.size == 0:
            return 0.0
        return np.max(np.abs(mine - other)) / np.max(np.abs(other))

    return float(np.max(jax.tree.leaves(jax.tree.map(one, ours, theirs))))
