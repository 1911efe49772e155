# SPDX-License-Identifier: Apache-2.0
"""Meshes change no result: one device, several devices, several processes."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_binary
import several_processes as processes
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from killable_runs import environment
from mutation import kills
from processes_in_threads import in_threads, small_run
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, meshes, noise
from dpjax.checks import Refused
from dpjax.gradients import batching
from dpjax.gradients._layout import _batch_axes
from dpjax.training.recipe import Recipe, reach_of

KEY = jax.random.key(0)


@pytest.mark.thorough
@pytest.mark.sample(1)
@kills("noise/normal.py", "z.imag, z.real)", "z.real, z.imag)", slow=True)
@pytest.mark.parametrize("shapes", [[(3, 5)], [(), (2, 1023), (1, 2, 3)], [(7, 600), (0, 4)]])
def test_numbers_that_are_drawn_in_parts_are_those_that_are_drawn_whole(shapes):
    """Position by position, so a device needs no other device's numbers."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    whole = np.split(noise.standard_normal(KEY, (sum(sizes),)), np.cumsum(sizes)[:-1])
    for part, shape, expected in zip(
        noise.normal.normal_in_parts(KEY, shapes), shapes, whole, strict=True
    ):
        assert part.shape == shape
        np.testing.assert_allclose(part.ravel(), expected, rtol=1e-6, atol=1e-7)


def joined(totals, reach):
    """The joined sums of shares, which are added one after the other as a ring adds."""
    mesh = jax.sharding.AbstractMesh(totals.block.shape[:1], ("i",))
    layout = batching.Layout(1, mesh, ("i",))
    join = jax.vmap(lambda total: batching._joined(total, 0, layout, [reach]), axis_name="i")
    value, lost, _ = jax.jit(join)(totals)
    return value[0], lost[0]


@kills("gradients/batching.py", "- info.nmant)", "- info.nmant - 2)", slow=True)
@pytest.mark.parametrize("parts", [1, 3])
def test_no_order_of_devices_changes_a_bit_of_the_sum(parts):
    """Not of the sum; what it lacks is rounded, far below."""
    sizes = [500, 10, 1e-5][:parts]
    draw = np.random.default_rng(1)
    block, *rest = (draw.uniform(0, x, (16, 400)).astype(np.float32) for x in sizes)
    totals = batching.Total(block, *rest)
    found = joined(totals, 2**13)
    for order in range(3):
        places = np.random.default_rng(order).permutation(16)
        again = joined(jax.tree.map(lambda x, at=places: x[at], totals), 2**13)
        np.testing.assert_array_equal(found[0], again[0])
    exact = sum(np.sum(x, axis=0, dtype=np.float64) for x in jax.tree.leaves(totals))
    # Half a unit of the smaller part for each share.
    error = 16 * 16 * 2.0 ** (13 - 23 - 23 - 1)
    np.testing.assert_allclose(np.sum(found, axis=0, dtype=np.float64), exact, rtol=0, atol=error)


def test_the_reach_of_a_leaf_is_that_of_its_own_group():
    """Twice a usual draw, each example at the bound of the group, in one coordinate."""
    rule = dataclasses.replace(clipping.grouped(1.0, 2), bounds=(0.25, 8.0))
    recipe = Recipe("dpsgd", None, None, mechanism_with(60, 20, clipping=rule))
    usual = recipe.mechanism.sampling.usual_size
    assert 20 <= usual < 60
    assert reach_of(recipe, {"b": jnp.zeros(3), "w": jnp.zeros(3)}) == [usual / 2, usual * 16]


def test_parameters_are_split_along_their_longest_even_axis():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    for shape, expected in {
        (3, 768): PartitionSpec(None, "model"),
        (1024, 64): PartitionSpec("model", None),
        (64,): PartitionSpec(),  # small
        (1023, 3): PartitionSpec(),  # odd
    }.items():
        assert meshes._default_spec(shape, mesh) == expected


@pytest.mark.parametrize(
    "text", ["data", "data:x", "data:64,model:64", "data:-1,model:-1", ":1", "data:0"]
)
def test_a_mesh_that_is_none_is_answered(text):
    with pytest.raises(ValueError, match=r"^meshes\.parse\(text=.*sizes for 1 devices"):
        meshes.parse(text)


DEVICES = """
import contextlib, sys, jax, jax.numpy as jnp
from dpjax import gradients, meshes
from dpjax.cli import machine_flags

meshes.os.cpu_count = lambda: 3
binary = machine_flags.mesh_in_force(None) if "binary" in sys.argv else contextlib.nullcontext()
with binary:
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    for _ in range(2):
        chosen = gradients.layout(loss, jnp.zeros((64, 64)), jnp.zeros((999, 64)), 4096)
print(jax.device_count(), chosen.shares)
"""


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("word", "chosen", "want", "said"),
    [
        ("library", "-1", "1 1", 1),
        ("library", "1", "1 1", 0),
        ("binary", "2", "2 2", 0),
        ("binary", "-1", "3 3", 0),
    ],
)
def test_binaries_use_the_cores_and_others_are_told_once(word, chosen, want, said):
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, word],
        env=environment() | {"JAX_NUM_CPU_DEVICES": chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == want.split()
    assert done.stderr.count("JAX_NUM_CPU_DEVICES=3") == said


SHORT = ["--steps=2", "--batch_size=64", "--hidden=64", "--noise_multiplier=2", "--accountant=rdp"]
SHORT += ["--evaluations=1", "--noreport"]


@pytest.mark.slow
def test_a_mesh_on_the_command_line_changes_no_parameter(tmp_path):
    found = []
    for name, flags in {"one": [], "two": ["--mesh=data:1,model:2"]}.items():
        run_binary.run("dpjax", "train", "--out", tmp_path / name, "--seed=1", *SHORT, *flags)
        held = serialization.msgpack_restore((tmp_path / name / "params.msgpack").read_bytes())
        found.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(held)]))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["hardware"]["devices"] == len(found)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_processes_of_the_command_line_train_one_run(tmp_path):
    """With one secret key. The first process alone writes, and prints."""
    flags = ["--num_processes=2", f"--coordinator_address=127.0.0.1:{processes.free_port()}"]
    each = [
        [
            "train",
            *SHORT,
            *flags,
            f"--process_id={i}",
            "--out",
            tmp_path / str(i),
            "--mesh=data:1,model:2",
        ]
        for i in range(2)
    ]
    first, second = run_binary.run_together("dpjax", each)
    assert first.stdout.count("Test accuracy") == first.stdout.count("cost epsilon") == 1
    assert "epsilon" not in second.stdout
    assert (tmp_path / "0" / "params.msgpack").exists()
    assert not (tmp_path / "1").exists()


def test_a_users_own_splitting_stays():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    own = NamedSharding(mesh, PartitionSpec("data", None))
    placed = meshes.placed({"w": jax.device_put(jnp.ones((2, 2)), own), "key": KEY}, mesh)
    assert placed["w"].sharding.spec == own.spec
    assert placed["key"].dtype == KEY.dtype
    other = Mesh(np.array(jax.devices()[:1]), ("batch",))
    array = jax.device_put(jnp.ones((2, 2)), NamedSharding(other, PartitionSpec(None, ("batch",))))
    assert meshes.placed(array, mesh).sharding.spec == PartitionSpec()


PLACES = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import dpjax
from processes_in_threads import small_run

first, *_, third, _ = devices = jax.devices()
key, params = jax.random.key(0), jnp.zeros(3)
x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
two, model = Mesh(np.array(devices[:2]), ("data",)), Mesh(np.array(devices), ("model",))
at = lambda device: lambda x: jax.device_put(x, device)
whole = at(NamedSharding(two, PartitionSpec()))
same = lambda x: x

plain, state = small_run(microbatch_size=2)
expected = plain.run(state, 2)[0].params

def held(algorithm, state, count=2):
    np.testing.assert_array_equal(algorithm.run(state, count)[0].params, expected)

# What the caller committed to a device is moved to the devices that dpjax chooses.
for data, first_params, root in (at(first), same, same), (at(third),) * 3, (same, whole, same):
    algorithm, _ = small_run(microbatch_size=2, data=data(x))
    held(algorithm, algorithm.init(first_params(params), root(key)))
# Parameters of a run on more devices, and states of other meshes.
square = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
odd = jax.device_put(jnp.zeros((6, 1001)), NamedSharding(square, PartitionSpec("model")))
row = Mesh(np.array(devices).reshape(1, 4), ("data", "model"))
assert dpjax.meshes.placed(odd, row).sharding.spec == PartitionSpec()
phase, _ = small_run(microbatch_size=12)
state = phase.init(expected, jax.random.key(1))
assert len(phase.step(state)[0].params.sharding.device_set) == 2
for mesh in two, model:
    other, state = small_run(microbatch_size=2, mesh=mesh)
    before = other.step(state)[0]
    mixed = state._replace(key=jax.device_put(state.key, devices[0]))
    np.testing.assert_array_equal(other.step(mixed)[0].params, before.params)
    for to in two, model, None:
        algorithm, _ = small_run(microbatch_size=2, mesh=to)
        after, _ = dpjax.fit(algorithm, before, steps=1, progress=False)
        np.testing.assert_allclose(after.params, expected, atol=1e-6)

def loss(w, x):
    return jnp.sum((w - x) ** 2)

rule = dpjax.clipping.flat(1.0)
expected = dpjax.clipped_grad(loss, rule)(params, x).value
for devices, put, where in (
    (None, at(third), {third}),
    (None, whole, set(devices[:2])),
    (4, at(third), set(devices)),
    (Mesh(np.array(devices[::-1]), ("data",)), whole, set(devices)),
):
    found = dpjax.clipped_grad(loss, rule, microbatch_size=5, devices=devices)(params, put(x)).value
    assert found.sharding.device_set == where
    np.testing.assert_allclose(found, expected, rtol=1e-5)
try:
    dpjax.clipped_grad(loss, rule)(at(first)(params), at(third)(x))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@kills(
    "training/_in_memory.py",
    "shared = self._held_on(mesh)",
    "shared = self._held_on(None)",
    slow=True,
)
def test_committed_arrays_and_states_of_other_meshes_run():
    """With several host devices, among which dpjax chooses."""
    program = [sys.executable, "-c", PLACES]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "incompatible devices" in done.stdout


@pytest.mark.slow
def test_a_state_with_numpy_leaves_runs_on_a_mesh():
    """As `jax.device_get` makes them."""
    algorithm, state = small_run(mesh=Mesh(np.array(jax.devices()[:1]), ("data",)))
    expected, _ = algorithm.step(state)
    state = state._replace(params=jax.device_get(state.params))
    found, _ = algorithm.step(state)
    np.testing.assert_array_equal(found.params, expected.params)


def test_an_fft_in_the_loss_splits_the_batch_over_all_devices():
    """XLA fails on some FFTs that it partitions."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    for loss, axes in {jnp.fft.rfft: ("data", "model"), jnp.tanh: ("data",)}.items():
        program = jax.make_jaxpr(jax.jit(loss))(jnp.ones(4)).jaxpr
        assert _batch_axes(mesh, program) == axes


@dataclasses.dataclass(frozen=True)
class Device:
    """What `meshes.of` reads of a device."""

    id: int
    process_index: int


@kills("meshes.py", 'lambda: {"the mesh": _named(mesh)}', 'lambda: {"the mesh": ""}', case="order")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(["0123", "2301"], "2 processes differ in the mesh", id="order"),
        pytest.param(["d 0123", "e 0123"], "2 processes differ in the mesh", id="names"),
        pytest.param(["0213", "0213"], None, id="equal"),
        pytest.param(["01", "23"], None, id="each of its own"),
    ],
)
def test_processes_agree_on_the_mesh_before_they_use_it(monkeypatch, given, words):
    """They would wait for each other for ever, after steps were admitted."""
    devices = [Device(i, i // 2) for i in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(meshes, "automatic", lambda mesh: mesh)

    def work(process):
        *name, places = given[process].split()
        flat = np.array([devices[int(i)] for i in places])
        mesh = SimpleNamespace(devices=flat, shape={"".join(name): len(flat)})
        return meshes.of(mesh).devices.size

    found = in_threads(monkeypatch, work)
    if words is None:
        assert found == 2 * [len(given[0])]
        return
    for error in found:
        with pytest.raises(Refused, match=f"^meshes.of: the {words}"):
            raise error


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before dpsgd", "after dpsgd"])
def test_explicit_axes_in_force_change_nothing(when):
    """`jax.make_mesh` makes them by default. Before `dpsgd`, they are the mesh of the run."""
    explicit = jax.make_mesh((1,), ("data",))
    algorithm, state = small_run()
    expected, _ = algorithm.run(state, 2)
    with jax.set_mesh(explicit) if when == "before dpsgd" else contextlib.nullcontext():
        algorithm, state = small_run()
    with jax.set_mesh(explicit):
        state, _ = algorithm.step(state)
        state, _ = dpjax.fit(algorithm, state, steps=1, progress=False)
    np.testing.assert_array_equal(state.params, expected.params)


def test_arrays_that_explicit_axes_split_are_refused_by_the_call():
    """JAX would raise within an engine, where a product or a reshape has no sharding."""
    split = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    rows = jax.device_put(np.ones((50, 3), np.float32), split)
    w = jax.device_put(np.zeros(3, np.float32), split)
    clipped = dpjax.clipped_grad(lambda w, x: jnp.sum((w - x) ** 2), clipping.flat(1.0))
    calls = {
        ("dpsgd", "data"): lambda: small_run(data=rows),
        ("clipped_grad", "data"): lambda: clipped(jnp.zeros(3), rows),
        ("clipped_grad", "parameters"): lambda: clipped(w, np.ones((50, 3))),
    }
    for (call, name), run in calls.items():
        words = f"^{call}: a mesh of explicit axes splits the {name}"
        with pytest.raises(ValueError, match=words):
            run()


def test_a_link_takes_gradients_of_parameters_that_explicit_axes_split():
    """Only the axis that is summed has to be whole."""
    mesh, rows = jax.make_mesh((1,), ("model",)), np.eye(4, 3, dtype=np.float32)
    link = dpjax.clip_and_sum(clipping.flat(0.5))
    state = link.init(jnp.zeros(3))
    summed = jax.jit(lambda rows: link.update(rows, state)[0].value)
    with jax.set_mesh(mesh):
        found = summed(jax.device_put(rows, NamedSharding(mesh, PartitionSpec(None, "model"))))
    np.testing.assert_allclose(found, summed(rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("data", "dpsgd: the 2 processes differ in the data"),
        ("state", "fit: the 2 processes differ in the state"),
    ],
)
def test_two_processes_of_two_runs_are_refused(tmp_path, differs, words):
    started = processes.start(tmp_path / "run", 2, differs=differs)
    codes, texts = processes.finish(started, tmp_path / "run")
    assert all(codes)
    assert all(words in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_are_told_the_key_the_folder_and_the_steps(tmp_path, count, alone):
    """The last one has another seed, no folder, or fewer steps; all run that of the first."""
    for differs in ("key", "directory", "steps") if count == 2 else ("key",):
        for found in processes.run(tmp_path / differs, count, differs=differs):
            np.testing.assert_allclose(found["params"], alone["params"], rtol=1e-5, atol=1e-6)
            assert found["steps"] == alone["steps"]


@pytest.mark.slow
def test_processes_share_secret_keys_or_meshes_of_their_own(tmp_path):
    for name, options in (("secret", {"supplied": False}), ("own", {"own_mesh": True})):
        one, other = processes.run(tmp_path / name, 2, steps=4, **options)
        assert one["params"] == other["params"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process on one device."""
    return processes.run(tmp_path_factory.mktemp("alone") / "run", 1)[0]


@pytest.mark.slow
@kills("training/_streaming.py", "where[self.places] = np.arange(len(self.places))", "", slow=True)
def test_a_run_whose_process_is_killed_resumes_in_all_of_them(tmp_path, alone):
    started = processes.start(tmp_path / "run", 2, stream=True, dies=8)
    codes, texts = processes.finish(started, tmp_path / "run")
    assert codes[1] == -9, texts
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert 0 < max(saved) <= 8
    # The other number of devices: what was saved is whole.
    both = processes.run(tmp_path / "run", 2, stream=True)
    for found in both:
        np.testing.assert_allclose(found["params"], alone["params"], rtol=1e-5, atol=1e-6)
        assert found["steps"] == alone["steps"] == [4, 8, 12]
    # Each process read the rows of its own device: about half of those since the checkpoint.
    counts = [found["rows read"] for found in both]
    assert all(0 < count < 0.7 * sum(counts) for count in counts), counts


@pytest.mark.slow
def test_a_run_goes_on_under_another_mesh(tmp_path, alone):
    """Four processes that split parameters, then two with two devices each, then one."""
    folder = tmp_path / "run"
    processes.run(folder, 4, mesh="data:2,model:2", steps=4)
    both = processes.run(folder, 2, devices=2, mesh="data:1,model:4", steps=8)
    assert [found["held"] for found in both] == 2 * [["(4, 128)"]]
    (found,) = processes.run(folder, 1, devices=4, mesh="data:4")
    np.testing.assert_allclose(found["params"], alone["params"], rtol=1e-5, atol=1e-6)
    assert found["steps"] == alone["steps"]


EIGHT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import flax.linen as nn, numpy as np, optax
import dpjax
from dpjax import losses, meshes, models, sampling, strategies
from small_mechanisms import mechanism_with

class Convolutions(nn.Module):  # the second has enough numbers to be split
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(8, (3, 3))(x.reshape(6, 6, 1)))
        return nn.Dense(4)(nn.tanh(nn.Conv(16, (3, 3))(x)).reshape(-1))

name, engine = sys.argv[1:]
banded = name == "banded noise"
model = models.MLP(features=(64, 64), classes=4) if banded else Convolutions()
x = np.random.default_rng(0).normal(size=(40, 36)).astype(np.float32)
sampler = sampling.cyclic_poisson(40, 16, cycle=2) if banded else sampling.poisson(40, 16)
strategy = strategies.square_root(2, bands=2) if banded else None
mechanism = mechanism_with(sampling=sampler, steps=2, noise=strategy)
loss, data = losses.of(model, losses.cross_entropy), (x, np.arange(40) % 4)
params = jax.device_get(model.init(jax.random.key(0), x[0])["params"])

def ends(mesh):
    options = {"engine": engine, "microbatch_size": 8, "mesh": mesh}
    algorithm = dpjax.dpsgd(loss, optax.adam(0.01), mechanism, data, **options)
    state, _ = algorithm.run(algorithm.init(params, jax.random.key(1)), 2)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(state.params))])

alone = ends(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
for text in ("data:8", "data:4,model:2", "data:2,model:4", "data:1,model:8"):
    np.testing.assert_allclose(ends(meshes.parse(text)), alone, rtol=0, atol=1e-6)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vmap"])
@pytest.mark.parametrize("loss", ["banded noise", "convolution"])
def test_no_mesh_changes_a_parameter(loss, engine):
    """Beyond the order of sums, after two steps on each mesh of eight devices."""
    command = [sys.executable, "-c", EIGHT, loss, engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-3000:]


DIGESTS = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dpjax import trees

params = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.float32(1)}
mesh = Mesh(np.array(jax.devices()), ("model",))
for axes in ((), ("model",), (None, "model")):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    print(trees.digest({**params, "w": jax.device_put(params["w"], sharding)}))
"""


@pytest.mark.thorough
def test_the_digest_of_parameters_does_not_depend_on_the_mesh():
    devices = environment() | {"JAX_NUM_CPU_DEVICES": "2"}
    program = [sys.executable, "-c", DIGESTS]
    done = subprocess.run(program, env=devices, capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 1
    assert len(done.stdout.split()) == 3
