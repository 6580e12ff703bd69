"""What is made of a model's predictions: the record of them, figures, findings and a report. No TensorFlow."""

#: Files of a report that others read: the page, and the list of findings.
REPORT, FINDINGS = "report.html", "findings.json"
