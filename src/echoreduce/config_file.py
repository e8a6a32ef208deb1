"""Configuration files: an `EchoConfig` as JSON, with the evidence that led to it.

    {"format": "echoreduce-config/1", "config": {"quant": ..., "feedback": ..., "algorithm": ..., "sites": ..., "rescale": ...},
     "evidence": {...}}

Why: a configuration found by calibration (`echoreduce recommend`) outlives its process, and says where it comes from. Reading is strict:
an unknown key, a value of another type or out of range is refused with its place and the value. A key that is absent means the default
of its dataclass. `sites` is a list with one entry a site (null: the bits of `quant`), or {"policy": NAME, ...} with a NAME of `POLICIES`.

Leaves out: what the evidence holds (`integrations.calibration`); it is carried, and never read here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from echoreduce.config import EchoConfig, FeedbackConfig, QuantConfig
from echoreduce.errors import ConfigError
from echoreduce.sites import EarlyHalf, Edges, SitePolicy, Uniform, check_bits

FORMAT = "echoreduce-config/1"
POLICIES: dict[str, type[Uniform] | type[Edges] | type[EarlyHalf]] = {"uniform": Uniform, "edges": Edges, "early_half": EarlyHalf}

T = TypeVar("T")


def save_config(path: str | Path, config: EchoConfig, evidence: dict[str, Any] | None = None) -> None:
    """Write a configuration file; folders are made.

    Args:
        path: of the file.
        config: its site policy is a named one or a list.
        evidence: anything that JSON holds.
    Raises:
        ConfigError: the site policy is a function, which no file can hold.
    """
    target = Path(path)
    text = json.dumps({"format": FORMAT, "config": config_to_dict(config), "evidence": evidence or {}}, indent=1)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n", encoding="utf-8")


def load_config(path: str | Path) -> EchoConfig:
    """Read a configuration file.

    Raises:
        ConfigError: no file, not JSON, another format, or a wrong value, which is quoted with its place.
    """
    source = Path(path)
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"no configuration file at {source}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise ConfigError(f"{source} is not a configuration file: its format must be {FORMAT!r}, got {found!r}")
    _known(data, ("format", "config", "evidence"), str(source))
    try:
        return config_from_dict(data.get("config"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def config_to_dict(config: EchoConfig) -> dict[str, Any]:
    """The configuration as JSON data; `config_from_dict` gives it back.

    Raises:
        ConfigError: the site policy is a function.
    """
    return {
        "quant": asdict(config.quant),
        "feedback": {**asdict(config.feedback), "decays": list(config.feedback.decays)},
        "algorithm": config.algorithm,
        "sites": _policy_data(config.sites),
        "rescale": config.rescale,
    }


def config_from_dict(data: Any) -> EchoConfig:
    """A configuration from JSON data.

    Raises:
        ConfigError: an unknown key, a value of another type, or one out of range.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"config must be an object, got {data!r}")
    _known(data, tuple(item.name for item in fields(EchoConfig)), "config")
    parts: dict[str, Any] = {name: data[name] for name in ("algorithm", "rescale") if name in data}
    if "quant" in data:
        parts["quant"] = _build(QuantConfig, data["quant"], "quant")
    if "feedback" in data:
        parts["feedback"] = _build(FeedbackConfig, data["feedback"], "feedback")
    if "sites" in data:
        parts["sites"] = _policy(data["sites"])
    return EchoConfig(**parts)


def _policy_data(policy: SitePolicy) -> Any:
    for name, kind in POLICIES.items():
        if isinstance(policy, kind):
            return {"policy": name, **asdict(policy)}
    if callable(policy):
        raise ConfigError(f"site policy {policy!r} is a function, which no file can hold; give one number of bits a site")
    return list(policy)


def _policy(data: Any) -> SitePolicy:
    if isinstance(data, list):
        if not data:
            raise ConfigError("sites: the list is empty")
        return tuple(None if bits is None else check_bits(_typed(bits, int, f"sites[{site}]")) for site, bits in enumerate(data))
    if not isinstance(data, dict) or data.get("policy") not in POLICIES:
        found = data.get("policy") if isinstance(data, dict) else data
        raise ConfigError(f"sites must be a list, or an object whose policy is one of {tuple(POLICIES)}, got {found!r}")
    values = {key: value for key, value in data.items() if key != "policy"}
    if data["policy"] == "uniform":
        _known(values, ("bits",), "sites")
        return Uniform(None if values.get("bits") is None else check_bits(_typed(values["bits"], int, "sites.bits")))
    return _build(POLICIES[data["policy"]], values, "sites")


def _build(kind: type[T], data: Any, place: str) -> T:
    """A dataclass from an object whose values have the types of its defaults."""
    if not isinstance(data, dict):
        raise ConfigError(f"{place} must be an object, got {data!r}")
    defaults = vars(kind())
    _known(data, tuple(defaults), place)
    return kind(**{key: _typed(value, type(defaults[key]), f"{place}.{key}") for key, value in data.items()})


def _known(data: dict[str, Any], accepted: tuple[str, ...], place: str) -> None:
    for key in data:
        if key not in accepted:
            raise ConfigError(f"{place}: unknown key {key!r}; known are {', '.join(accepted)}")


def _typed(value: Any, kind: type[Any], place: str) -> Any:
    """The value if JSON's type for it is the wanted one; whole numbers pass for fractions, lists of numbers become tuples."""
    if kind is tuple and isinstance(value, list):
        return tuple(_typed(item, float, f"{place}[{index}]") for index, item in enumerate(value))
    if type(value) is kind or (kind is float and type(value) is int):
        return float(value) if kind is float else value
    wanted = {int: "a whole number", float: "a number", str: "a text", tuple: "a list of numbers"}.get(kind, kind.__name__)
    raise ConfigError(f"{place} must be {wanted}, got {value!r}")
