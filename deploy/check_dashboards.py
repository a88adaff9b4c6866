"""Check the dashboard and the alert rules with a running Prometheus.

    python deploy/check_dashboards.py http://127.0.0.1:9090

Every query must be valid. A query of the dashboard must return data, unless it is about errors,
which a healthy server does not have.
"""

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent
VARIABLES = {"$__rate_interval": "1m", "$instance": ".+"}
# Families without a sample until the first error.
EMPTY_UNTIL_AN_ERROR = ("http_errors_total", "request_errors_total")


def dashboard_queries() -> list[str]:
    """Return the queries of the panels, with values for the dashboard's variables."""
    dashboard = json.loads((ROOT / "grafana" / "dashboard.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


def alert_queries() -> list[str]:
    """Return the expressions of the alerts."""
    groups = yaml.safe_load((ROOT / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def num_series(url: str, query: str) -> int:
    """Return how many series a query has now. Raise HTTPError for one that is not valid."""
    arguments = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"{url}/api/v1/query?{arguments}", timeout=10) as answer:
        return len(json.load(answer)["data"]["result"])


def main(url: str) -> int:
    """Print each query with its number of series; return 1 if one fails, else 0."""
    failed = 0
    must_have_data = dict.fromkeys(dashboard_queries(), True) | dict.fromkeys(
        alert_queries(), False
    )
    for query, needed in must_have_data.items():
        needs_data = needed and not any(name in query for name in EMPTY_UNTIL_AN_ERROR)
        try:
            count = num_series(url, query)
            is_wrong, shown = needs_data and count == 0, str(count)
        except urllib.error.HTTPError as error:
            is_wrong, shown = True, error.read().decode()
        failed += is_wrong
        print("FAIL" if is_wrong else "ok  ", shown, " ".join(query.split()))
    print(f"{len(must_have_data)} queries, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/")))
