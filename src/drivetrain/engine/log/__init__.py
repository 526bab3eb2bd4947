"""From figures on the device to logged rows."""
