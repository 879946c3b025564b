"""What people read: amounts in words, and tables for the terminal."""

from jaxckpt.report.tables import comparison_parts as comparison_parts
from jaxckpt.report.tables import device_table as device_table
from jaxckpt.report.tables import format_bytes as format_bytes
from jaxckpt.report.tables import format_flops as format_flops
from jaxckpt.report.tables import format_seconds as format_seconds
from jaxckpt.report.tables import measurement_table as measurement_table
from jaxckpt.report.tables import policy_markdown as policy_markdown
from jaxckpt.report.tables import policy_table as policy_table
from jaxckpt.report.tables import rule_text as rule_text
from jaxckpt.report.tables import rules_said as rules_said
from jaxckpt.report.tables import train_table as train_table
