"""`bimetal calibrate`: measure a device through the engine, for plans and simulations to use."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bimetal.cli.placement import engine_options, placement_options, resolve_plan

DEFAULT_MODEL_LEN = 768
DEFAULT_NUM_SEQS = 8


@click.command(name="calibrate")
@placement_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("calibration.json"), help="Write it here."
)
def command(file: Path | None, output: Path, **flags: Any) -> None:
    """Measure FILE (a plan or fleet) or --model: decode steps, prompts, hops; find the device's terms.

    Example: bimetal calibrate --model .demo/SmolLM2-135M-Instruct --layers 17,13 --num-threads 1
    """
    from bimetal.engine.calibrate import measure
    from bimetal.engine.driver.driver import Driver
    from bimetal.errors import ConfigError
    from bimetal.units import format_s

    try:
        from bimetal.perf.device import fit_device, save_devices
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bimetal[perf]"') from error
    flags["max_model_len"] = flags["max_model_len"] or DEFAULT_MODEL_LEN
    flags["max_num_seqs"] = flags["max_num_seqs"] or DEFAULT_NUM_SEQS
    flags["enable_prefix_caching"] = False
    driver = Driver(engine_options(resolve_plan(file, flags), flags))
    try:
        driver.start()
        samples = measure(driver, lambda text: click.echo(f"measured {text}", err=True))
    finally:
        driver.stop()
    device = fit_device(samples.steps, samples.prompts, samples.hop_s, datetime.now(UTC).date().isoformat())
    save_devices([device], output)
    click.echo(f"{device.device}: {device.num_samples} samples, median error {device.median_error_ratio:.1%}")
    for term, value in device.terms.items():
        click.echo(f"  {term:<13} {format_s(value) if term.endswith('_s') else f'{value:.3f}'}")
    if device.hop_s is not None:
        click.echo(f"  {'hop':<13} {format_s(device.hop_s)}")
    click.echo(f"written to {output}")
