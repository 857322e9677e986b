"""`bimetal perf`: fit the performance model, and hold it to measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from bimetal.cli.float_range import FloatRange

MOST = 1e9


@click.group(name="perf")
def command() -> None:
    """Fit the performance model, and hold it to measurements.

    Example: bimetal perf validate rows.csv
    """


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--coefficients", type=click.Path(path_type=Path), help="Folder written by `perf fit -o`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def validate(file: Path, coefficients: Path | None, as_json: bool) -> None:
    """Predict every row of FILE, a CSV file, and print the errors.

    Columns: gpu, model, isl, osl (tokens in and out), load (closed-loop, static-batch, offline, ...) and engine, which every
    row needs; concurrency_or_batch, weight_dtype, kv_dtype, tp, n_gpus; and what was measured: ttft_ms_mean or _p50,
    tpot_ms_mean or _p50, out_tok_s. src/bimetal/catalog/data/measured.csv has all of them.
    """
    from bimetal.cli.perf_table import print_validation, validation_document
    from bimetal.perf.calibration import load_calibration, published_calibration
    from bimetal.perf.measurements import read_measurements
    from bimetal.perf.validate import validate as run

    rows = read_measurements(file)
    calibration = load_calibration(coefficients) if coefficients else published_calibration()
    validation = run(rows, calibration)
    if as_json:
        click.echo(json.dumps(validation_document(validation), indent=1))
    else:
        print_validation(validation)


@command.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the coefficients."
)
@click.option(
    "--rows", "file", type=click.Path(path_type=Path), help="Fit this file instead of bimetal's own rows."
)
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write the cross-validation's report here (markdown)."
)
def fit(output: Path, file: Path | None, report: Path | None) -> None:
    """Fit the coefficients, cross-validate them, and write both down.

    Some minutes on one core. Needs scipy: pip install "bimetal[perf]".
    """
    from bimetal.errors import ConfigError
    from bimetal.perf.measurements import published, read_measurements

    try:
        from bimetal.perf.study import run_study, save_study
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bimetal[perf]"') from error
    rows = read_measurements(file) if file else published()
    today = datetime.now(UTC).date().isoformat()
    study = run_study(rows, today, lambda text: click.echo(text, err=True))
    save_study(study, output, report)
    click.echo(f"coefficients and residuals in {output}" + (f", report in {report}" if report else ""))


@command.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File for the curve.")
@click.option(
    "--rows", "file", type=click.Path(path_type=Path), help="Fit this file instead of bimetal's own rows."
)
def power(output: Path, file: Path | None) -> None:
    """Fit how much slower power-capped GPUs are, and write the curve down."""
    from bimetal.errors import ConfigError
    from bimetal.perf.measurements import published, read_measurements
    from bimetal.perf.power import fit_power_curve, save_power_curve

    rows = read_measurements(file) if file else published()
    curve = fit_power_curve(rows.measurements, datetime.now(UTC).date().isoformat())
    try:
        save_power_curve(curve, output)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}: give a path in a folder that exists") from error
    for name, found in (("prompts", curve.compute), ("decoding", curve.memory)):
        click.echo(
            f"{name}: rate = (cap / TDP)^{found.exponent:.3f}; {found.num_pairs} pairs of rows, errors of the rate: median "
            f"{found.median_error:.2%}, worst {found.worst_error:.2%}"
        )
    click.echo(f"curve in {output}; nothing is claimed below {curve.lowest_ratio:.0%} of TDP")


@command.command()
@click.argument("gpu")
@click.argument("model")
@click.option("--dtype", type=click.Choice(["bfloat16", "float8", "float4", "mxfp4"]), default="float8")
@click.option("--engine", default="vllm", help="Engine family, as in `perf validate`'s table.")
@click.option("--tensor-parallel", "-t", type=click.IntRange(1, 72), default=1)
@click.option("--input-tokens", "-i", type=FloatRange(1, MOST), default=1024)
@click.option("--output-tokens", "-n", type=FloatRange(2, MOST), default=1024)
@click.option("--concurrency", "-c", type=FloatRange(1, MOST), default=16)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    gpu: str,
    model: str,
    dtype: str,
    engine: str,
    tensor_parallel: int,
    input_tokens: float,
    output_tokens: float,
    concurrency: float,
    as_json: bool,
) -> None:
    """What MODEL on GPU will do in a closed loop, with 90% intervals.

    Example: bimetal perf estimate MI300X Llama-3.1-70B -t 8 --engine vllm-rocm
    """
    from bimetal.catalog.hardware import find_gpu
    from bimetal.catalog.planned_models import planned_model
    from bimetal.perf.calibration import published_calibration
    from bimetal.perf.estimate import estimate_serving
    from bimetal.perf.point import ServingPoint

    point = ServingPoint(
        gpu=find_gpu(gpu),
        model=planned_model(model),
        engine=engine,
        weight_format=dtype,  # type: ignore[arg-type]
        kv_bytes=2.0,
        tensor_parallel=tensor_parallel,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        regime="closed-loop",
        concurrency=concurrency,
    )
    found = estimate_serving(point, published_calibration())
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    from bimetal.cli.perf_table import print_estimate

    print_estimate(found)
