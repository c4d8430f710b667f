"""Diagnosis of a run from its metrics: rules, alarms, causes. Used during the run and afterwards; needs no torch."""
