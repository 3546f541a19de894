"""Speed as ratios, measured side by side in one run. ``python -m benchmarks`` lists what there is."""
