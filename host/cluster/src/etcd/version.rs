//! Which versions of etcd can be used.

/// What is known of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No fault that matters is known.
    Good,
    /// It has a fault that costs time or room but no data.
    Doubtful(String),
    /// It can lose or change committed data, or it is not etcd.
    Unusable(String),
}

pub(super) fn judge(version: &str) -> Verdict {
    let mut parts = version.split(['.', '-', '+']).map(str::parse::<u32>);
    let mut next = || parts.next().and_then(Result::ok);
    let (Some(major), Some(minor), Some(patch)) = (next(), next(), next()) else {
        return Verdict::Unusable(format!(
            "an endpoint has the version {version:?}: it is not etcd"
        ));
    };
    match (major, minor, patch) {
        (0..=2, _, _) | (3, 0..=3, _) => Verdict::Unusable(format!(
            "etcd {version} is too old: use 3.4 or later, and best 3.5.30 or later"
        )),
        // etcd issues 13766 and 14685.
        (3, 5, 0..=5) => Verdict::Unusable(format!(
            "etcd {version} can lose committed data after a crash: use 3.5.6 or later"
        )),
        // etcd issue 17780.
        (3, 4, 0..=31) | (3, 5, 6..=13) => Verdict::Doubtful(format!(
            "a member of etcd {version} can count revisions wrongly after a crash: 3.5.30 or later is better"
        )),
        _ => Verdict::Good,
    }
}

/// Refuses versions that can lose or change committed data. Fails with a text for the operator.
pub(super) fn check_version(version: &str) -> Result<(), String> {
    match judge(version) {
        Verdict::Good | Verdict::Doubtful(_) => Ok(()),
        Verdict::Unusable(reason) => Err(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_with_wrong_revisions_is_doubtful() {
        for version in ["3.4.23", "3.4.31", "3.5.6", "3.5.13"] {
            let verdict = judge(version);
            assert!(matches!(verdict, Verdict::Doubtful(_)), "{version}");
        }
        for version in ["3.4.32", "3.5.14", "3.6.0"] {
            assert_eq!(judge(version), Verdict::Good, "{version}");
        }
    }

    #[test]
    fn version_with_data_loss_is_refused() {
        for version in [
            "3.5.0",
            "3.5.5",
            "3.5.2-rc.1",
            "3.3.25",
            "2.3.8",
            "kine",
            "",
        ] {
            assert!(check_version(version).is_err(), "{version}");
        }
        for version in ["3.4.23", "3.5.6", "3.5.16", "3.6.0-rc.1", "3.7.1", "4.0.0"] {
            assert!(check_version(version).is_ok(), "{version}");
        }
    }
}
