"""The update of a pair tensor by triangle attention: layer norm, attention, gate and output product."""
