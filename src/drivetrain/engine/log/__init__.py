"""From metrics on the device to logged rows: slots (names and places), ring (rows on the device), rows (of metrics.jsonl), observe."""
