"""E1- and E2-weights: the effective precision of the weights, from the live modules, codes and scales.

E1-weights: every converted module holds codes and scales of the resolved format, with the formula's bytes and
no second copy of its weight; every other linear layer is native. E2-weights: sampled codes and scales equal
the source (the reference quantizer of the native weight, or the checkpoint); every layer is within E4M3's
rounding of its native weight; nothing has changed since it was loaded.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.load import DTYPES, LoadedModel
from kvbench.engines.reference.weights.blocks import ON_LOAD, checksum, native_checksums, share_of_bound
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence.probe_values import level_of, same_bits
from kvbench.formats.fp8_checkpoint import routers
from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.matrix.resolve_backend import Decision
from kvbench.records.record import UNVERIFIED, Level
from kvbench_kernels.gemm.blockwise import BLOCK


def fp8_modules(model: nn.Module) -> dict[str, Fp8Linear]:
    """The FP8 linear layers by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def groups(model: nn.Module) -> list[list[tuple[str, Fp8Linear]]]:
    """The FP8 linear layers by product: those that are multiplied together, in the order of their columns."""
    named = fp8_modules(model)
    names = {id(module): name for name, module in named.items()}
    followers = {id(m) for module in named.values() for m in module.group[1:]}
    return [
        [(names[id(m)], m) for m in (module.group or (module,)) if id(m) in names]
        for module in named.values()
        if id(module) not in followers
    ]


def weights_level(loaded: LoadedModel, decision: Decision) -> tuple[Level, str]:
    """E1-weights, and the format that the live modules show: one of `WEIGHT_FORMATS`, or "mixed"."""
    asked = WEIGHT_FORMATS[decision.weights.resolved]
    found, wrong, total, payload, scales = set(), [], 0, 0, 0
    for name, module in loaded.model.named_modules():
        live = live_format(module)
        if live is None:
            continue
        expected_format = asked.name if name in loaded.weights.modules else "native"
        if expected_format != "native" or live != "native":
            found.add(live)
        if live != expected_format:
            wrong.append(f"{name} is stored as {live} ({_dtype_of(module)}), expected {expected_format}")
        elif isinstance(module, Fp8Linear):
            total += 1
            (n, k), scale = module.weight.shape, dtype_name(module.weight_scale_inv.dtype)
            expected = weight_bytes(asked, n, k, dtype_name(loaded.dtype), scale)
            held = [t.numel() * t.element_size() for t in (module.weight, module.weight_scale_inv)]
            payload, scales = payload + held[0], scales + held[1]
            if held != [expected.payload, expected.scales]:
                wrong.append(f"{name} holds {sum(held)} B, {asked.name} takes {expected.total} B")
            beside = _beside(module)
            if (size := sum(beside.values())) >= held[0]:
                what = max(beside, key=lambda attribute: beside[attribute])
                wrong.append(f"{name} holds {size} B beside its codes, in {what}: its weight a second time")
        elif live == "native" and name in loaded.weights.stored:
            wrong.append(f"{name} is native, and FP8 in the checkpoint's files")
        elif live == "native" and _left_out(name, loaded):
            wrong.append(f"{name} was left native, beside layers that were quantized")
    wrong += _outside(loaded.model)
    if asked.name != "native" and not loaded.weights.modules:
        wrong.append("no module was converted")
    effective = "native" if not found else found.pop() if len(found) == 1 else "mixed"
    right = f"{total} linear layers hold only {asked.name} codes and scales; live bytes equal the formula."
    if asked.name == "native":
        right = f"Every linear layer holds its weight in {dtype_name(loaded.dtype)}."
    facts = {"modules": total, "payload": payload, "scales": scales, "source": loaded.weights.source}
    what = f"weights {asked.name} are not what the model holds"
    return level_of("E1-weights", wrong, what, right, **facts), effective


def _left_out(name: str, loaded: LoadedModel) -> bool:
    """Whether a native linear layer is among the decoder layers of a model that was quantized on loading.

    A checkpoint may have such layers: its config names them, and the loader compares the files with it.
    """
    if loaded.weights.source != ON_LOAD or not loaded.weights.modules:
        return False
    layers = loaded.weights.modules[0].split(".0.")[0]
    return name.startswith(f"{layers}.") and name not in routers([n for n, _ in loaded.model.named_modules()])


def _dtype_of(module: nn.Module) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return dtype_name(weight.dtype)


def live_format(module: nn.Module) -> str | None:
    """The format of a linear layer's weight, by its tensors alone; None for anything but a linear layer."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, Fp8Linear)) or not isinstance(weight, Tensor):
        return None
    if not isinstance(module, Fp8Linear):
        return "native" if weight.dtype in DTYPES.values() else dtype_name(weight.dtype)
    for fmt in WEIGHT_FORMATS.values():
        if fmt.payload_dtype == dtype_name(weight.dtype):
            return fmt.name
    return "native"  # dequantized


def stored_weights(loaded: LoadedModel) -> str:
    """Dtypes of the weights of the linear layers, with those of their scales."""
    kinds = set()
    for module in loaded.model.modules():
        if isinstance(module, Fp8Linear):
            scales = dtype_name(module.weight_scale_inv.dtype)
            kinds.add(f"{dtype_name(module.weight.dtype)} + {scales} scales")
        elif isinstance(module, nn.Linear):
            kinds.add(dtype_name(module.weight.dtype))
    return " and ".join(sorted(kinds))


def _beside(module: Fp8Linear) -> dict[str, int]:
    """Bytes that a module keeps outside its codes, scales and bias, by attribute.

    `_ahead` is the output of a call in progress, not a part of the layer.
    """
    known = [module.weight, module.weight_scale_inv, module.bias, *(module._joined or ())]
    seen = {t.untyped_storage().data_ptr() for t in known if t is not None}
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        for tensor in _tensors(value) if name not in ("_ahead", "group") else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] = found.get(name, 0) + storage.nbytes()
    return found


def _outside(model: nn.Module) -> Iterator[str]:
    """Modules without codes that keep tensors as large as a layer's codes outside parameters and buffers."""
    smallest = min((m.weight.numel() for m in fp8_modules(model).values()), default=0)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    apart = ("_parameters", "_buffers", "_modules", "ahead", "group")
    native = [(name, m) for name, m in model.named_modules() if not isinstance(m, Fp8Linear)]
    kept = [(name, *held) for name, module in native for held in vars(module).items()]
    for name, attribute, value in kept if smallest else ():
        if attribute not in apart:
            storages = [tensor.untyped_storage() for tensor in _tensors(value)]
            found = {storage.data_ptr(): storage.nbytes() for storage in storages}
            held = sum(size for at, size in found.items() if at not in own)
            if held >= smallest:
                where = name or "the model"
                yield f"{where} holds {held} B outside its parameters, in {attribute}: weights a second time"


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a value, and in what it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from _tensors(vars(value))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)


def source_level(loaded: LoadedModel) -> Level:
    """E2-weights: the samples and checksums kept at loading, compared with what the modules hold now."""
    modules, wrong, samples = fp8_modules(loaded.model), [], loaded.weights.samples
    for sample in samples:
        module = modules.get(sample.module)
        if module is None:
            wrong.append(f"{sample.module} is not an FP8 module")
            continue
        rows = slice(sample.row, sample.row + len(sample.codes))
        first = sample.row // BLOCK
        codes = module.weight.data[rows].cpu()
        scales = module.weight_scale_inv.data[first : first + len(sample.scales)].cpu()
        where = f"{sample.module}, rows from {sample.row}"
        if not same_bits(scales, sample.scales):
            wrong.append(f"{where}: the stored scales differ from the source's")
        if not same_bits(codes, sample.codes):
            wrong.append(f"{where}: the stored codes differ from the source's")
        if sample.native is not None and (share := share_of_bound(sample.native, codes, scales)) > 1:
            far = f"up to {share:.3g} times E4M3's rounding from the native weight"
            wrong.append(f"{where}: stored values are {far}")
    for name, module in modules.items():
        if loaded.weights.checksums.get(name) != checksum(module.weight.data, module.weight_scale_inv.data):
            wrong.append(f"{name}: codes or scales are not those that the layer was loaded with")
        if (share := loaded.weights.shares.get(name, 0.0)) > 1:
            far = f"up to {share:.3g} times E4M3's rounding from the native weight"
            wrong.append(f"{name}: stored values were made {far}")
    native, before = native_checksums(loaded.model, modules), loaded.weights.native
    changed = [name for name in {**before, **native} if before.get(name) != native.get(name)]
    wrong += [f"{name}, which is native, is not what was loaded" for name in changed]
    if not samples:
        return Level("E2-weights", UNVERIFIED, "No sample of the source was kept when the model was loaded.")
    source = "the reference quantizer's" if samples[0].native is not None else "the checkpoint's"
    right = (
        f"Codes and scales of {len(samples)} sampled strips are {source}; those of all {len(modules)} layers"
    )
    right += f", and {len(native)} native tensors, are as they were loaded."
    facts = {"samples": len(samples), "checksums": len(loaded.weights.checksums), "native": len(native)}
    return level_of("E2-weights", wrong, "Stored weights are not the source's", right, **facts)
