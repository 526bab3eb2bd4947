"""What machines of Google Cloud cost, from a list of prices with its date. Pure, but for reading prices.json."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.consent import Cost, Price
from drivetrain.targets.gcp.settings import ATTACHED, GcpSettings, machine_type, num_machines, region

HOURS_IN_MONTH = 730
MIN_MINUTES = 20
"""The drivers of a new machine need most of this."""


@cache
def price_list() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("prices.json").read_text()))


def machine_hourly(settings: GcpSettings) -> float:
    """Returns US dollars for an hour of one machine, without its disk and address."""
    if settings.hourly_price is not None:
        return settings.hourly_price
    name = machine_type(settings)
    hourly = price_list()["machine_types"].get(name)
    if hourly is None:
        raise Problem(
            f"the price of {name} is not known here: write `hourly_price: DOLLARS` in the target (cloud.google.com/compute/all-pricing)"
        )
    attached = settings.gpus_per_machine if settings.use_gpu and settings.accelerator_type in ATTACHED else 0
    return float(hourly) + attached * float(price_list()["accelerators"].get(settings.accelerator_type, 0))


def machine_text(settings: GcpSettings) -> str:
    """Returns the words for the machines, as `2 x n1-standard-4 with 1 nvidia-tesla-t4 in us-central1-a`."""
    gpus = f" with {settings.gpus_per_machine} {settings.accelerator_type}" if settings.use_gpu else ""
    where = ", ".join(settings.zones or [settings.zone])
    return f"{num_machines(settings)} x {machine_type(settings)}{gpus} in {where}{' (spot: at most this price)' if settings.spot else ''}"


def cost_of(settings: GcpSettings, max_cost: float | None) -> Cost:
    """Returns what the machines cost; with `max_cost`, until that has been spent."""
    prices, number = price_list(), num_machines(settings)
    disk = number * settings.boot_disk_gb * prices["disk_gb_month"] / HOURS_IN_MONTH
    lines = (
        Price(machine_text(settings), number * machine_hourly(settings)),
        Price(f"{number} x {settings.boot_disk_gb} GB of disk, also while the machines are stopped", disk),
        Price(f"{number} x external address", number * prices["address_hour"]),
    )
    here = region(settings)
    other = f"; {here} may cost more: then set hourly_price" if settings.hourly_price is None and here != prices["region"] else ""
    own = "; of the machines: hourly_price of the target" if settings.hourly_price is not None else ""
    source = f"{prices['source']}, read {prices['read']}{other}{own}"
    hourly = sum(line.hourly for line in lines)
    if max_cost is None:
        return Cost(lines, source)
    after = f"then ${disk * HOURS_IN_MONTH:,.2f} a month for the disks, which stay until `drivetrain down`"
    return Cost(lines, source, max_minutes(max_cost, hourly) / 60, after)


def max_minutes(max_cost: float, hourly: float) -> int:
    """Returns the whole minutes that a sum pays for."""
    minutes = math.floor(max_cost / hourly * 60)
    if minutes < MIN_MINUTES:
        need = math.ceil(hourly * MIN_MINUTES / 60 * 100) / 100
        raise Problem(
            f"${max_cost:,.2f} pays for {minutes} minutes of these machines, which need {MIN_MINUTES}: give --max-cost {need:.2f} or more"
        )
    return minutes
