"""The names of the files of a report that others read."""

#: The page.
REPORT = "report.html"

#: The list of findings.
FINDINGS = "findings.json"
