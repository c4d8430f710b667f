"""Memory at run time: gauges, the out-of-memory ladder, its record and calibration."""
