//! Metrics of policies.

use std::collections::BTreeMap;

use super::page::{Family, Labels, Page};
use crate::policies::manager::PolicyView;
use statehouse_core::policy::Digest;
use statehouse_server::shadow::ShadowReport;

pub(super) fn policies(page: &mut Page, policies: &[PolicyView]) {
    let role = page.gauge("policy_role", "1 for each role of a policy");
    each(role, policies, |policy| {
        named("role", policy.roles.iter().map(|role| (role.name(), 1)))
    });
    let requests = page.counter("policy_requests", "Requests handled by a policy");
    each(requests, policies, |policy| {
        vec![(None, policy.done.requests)]
    });
    let help = "Requests by the command that the policy reports";
    let by_command = page.counter("policy_command_requests", help);
    each(by_command, policies, |policy| {
        // A policy may use one name for two commands, and a page must not repeat a sample.
        let mut commands = BTreeMap::<_, u64>::new();
        for it in &policy.commands {
            *commands.entry(&it.name).or_default() += it.requests;
        }
        named("command", commands)
    });
    let help = "Errors that a policy answered with, by their texts; `other` beyond a limit";
    let errors = page.counter("policy_errors", help);
    each(errors, policies, |policy| {
        named("error", policy.errors.clone())
    });
    let help = "Counters that a policy increases, by their names; `other` beyond a limit";
    let counts = page.counter("policy_count", help);
    each(counts, policies, |policy| {
        named("name", policy.counters.clone())
    });
    let failures = page.counter(
        "policy_call_failures",
        "Failed policy calls, by kind of failure",
    );
    each(failures, policies, |policy| {
        let it = &policy.done.failures;
        let kinds = [
            ("fuel", it.fuel),
            ("watchdog", it.watchdog),
            ("trap", it.trap),
            ("malformed", it.malformed),
        ];
        named("kind", kinds)
    });
    let mean = page.gauge("policy_fuel_mean", "Mean fuel of a request");
    each(mean, policies, |policy| vec![(None, policy.done.fuel_mean)]);
    let max = page.gauge("policy_fuel_max", "Maximum fuel of a request");
    each(max, policies, |policy| vec![(None, policy.done.fuel_max)]);
    let help = "Sampled requests that a fresh instance answered differently";
    let impure = page.counter("policy_impure", help);
    each(impure, policies, |policy| vec![(None, policy.done.impure)]);
}

/// The values of a policy with a label, each a name and a count.
fn named<N: Into<String>>(
    label: &'static str,
    counts: impl IntoIterator<Item = (N, u64)>,
) -> Vec<(Option<(&'static str, String)>, u64)> {
    let counts = counts.into_iter();
    counts
        .map(|(name, count)| (Some((label, name.into())), count))
        .collect()
}

/// Adds the values of each policy, each with an extra label or none.
fn each(
    family: &mut Family,
    policies: &[PolicyView],
    values: impl Fn(&PolicyView) -> Vec<(Option<(&'static str, String)>, u64)>,
) {
    for policy in policies {
        for (further, value) in values(policy) {
            let mut labels = labels(&policy.name, &policy.version, policy.digest);
            labels.extend(further);
            family.sample(labels, value);
        }
    }
}

fn labels(name: &str, version: &str, digest: Digest) -> Labels {
    vec![
        ("policy", name.to_owned()),
        ("version", version.to_owned()),
        ("digest", digest.short()),
    ]
}

pub(super) fn shadow(page: &mut Page, report: &ShadowReport) {
    let help = "Requests of the current or last comparison in shadow, by result";
    let family = page.gauge("shadow_requests", help);
    let policy = &report.policy;
    for (result, count) in [
        ("same", report.same),
        ("different_answer", report.different_answer),
        ("different_effect", report.different_effect),
        ("failed", report.failed),
        ("not_comparable", report.not_comparable),
        ("skipped", report.skipped),
    ] {
        let mut labels = labels(&policy.name, &policy.version, policy.digest);
        labels.push(("result", result.to_owned()));
        family.sample(labels, count);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;
    use crate::policies::manager::CommandView;
    use statehouse_core::policy::Done;

    /// Scrapers reject a page that repeats a sample.
    #[test]
    fn counts_are_samples_by_name_and_no_name_is_repeated() {
        let commands = [1, 2].map(|requests| CommandView {
            name: "SET".into(),
            requests,
        });
        let view = PolicyView {
            name: "rule".into(),
            version: "1".into(),
            digest: Digest::of(b""),
            bytes: 1,
            built_in: false,
            roles: Vec::new(),
            done: Done::default(),
            commands: commands.into(),
            counters: [("cache misses".to_owned(), 7)].into(),
            errors: [("syntax error".to_owned(), 2)].into(),
        };
        let mut page = Page::default();
        policies(&mut page, &[view]);
        let text = page.text(Format::OpenMetrics);
        let digest = Digest::of(b"").short();
        for (metric, label, value) in [
            ("command_requests", "command=\"SET\"", 3),
            ("count", "name=\"cache misses\"", 7),
            ("errors", "error=\"syntax error\"", 2),
        ] {
            let samples: Vec<&str> = text.lines().filter(|line| line.contains(label)).collect();
            let policy = format!("policy=\"rule\",version=\"1\",digest=\"{digest}\"");
            let expected = format!("statehouse_policy_{metric}_total{{{policy},{label}}} {value}");
            assert_eq!(samples, [expected]);
        }
    }
}
