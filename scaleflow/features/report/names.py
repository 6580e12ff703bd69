"""Names of report files that other modules read."""

#: The page.
REPORT = "report.html"

#: The list of findings.
FINDINGS = "findings.json"
