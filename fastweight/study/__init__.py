"""Several models and seeds of one recipe, side by side on one device: plans, runs, outcomes, reports."""
