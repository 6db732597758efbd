"""The names of what a run writes into its folder, `trainer.output_dir`; those of a format of its own stand beside that format."""

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"  # resolved
SUMMARY_FILE = "summary.json"  # of a run that has ended well
FAILURE_FILE = "failure.txt"  # of one that has not
STATUS_FILE = "status.json"  # where it is right now
REPORT_FILE = "report.html"
