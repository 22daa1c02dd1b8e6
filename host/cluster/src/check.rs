//! Checks of an engine and of a cluster for operators: each finding says what was measured and what
//! to do.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::access::{Access, ClusterError, delete, put};
use crate::engine::{EngineError, Status};
use crate::head::{Head, LOG_FORMAT};
use crate::host::RETRY;
use crate::presence::{MemberEntry, MemberInfo, members};
use crate::{limits, space};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Good,
    /// The cluster works, but it is slower or less available than it could be.
    Warning,
    /// The cluster does not work, or can lose data.
    Failure,
}

/// The settings that [`crate::Description::settings`] covers, for operators.
pub const AGREEING_SETTINGS: &str =
    "--node, --dialect and --policy-property, and --traces on all or on none";

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was measured, as one clause.
    pub measured: String,
    /// What to do; empty if nothing.
    pub advice: String,
}

/// The findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All findings, in the order of the checks.
    pub findings: Vec<Finding>,
    /// The name of the leader and the address at which other hosts should reach it. `None` if it
    /// gave no sign of life. The check connects to etcd only.
    pub leader: Option<(String, String)>,
}

impl Finding {
    pub(crate) fn new(severity: Severity, measured: String, advice: &str) -> Self {
        Self {
            severity,
            measured,
            advice: advice.to_owned(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Good => "good",
            Severity::Warning => "warning",
            Severity::Failure => "FAILURE",
        };
        write!(f, "{severity}: {}", self.measured)?;
        if !self.advice.is_empty() {
            write!(f, "; {}", self.advice)?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    /// One line per finding.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        Ok(())
    }
}

impl Report {
    /// The worst severity.
    #[must_use]
    pub fn worst(&self) -> Severity {
        let severities = self.findings.iter().map(|it| it.severity);
        severities.max().unwrap_or(Severity::Good)
    }

    fn add(&mut self, severity: Severity, measured: String, advice: &str) {
        self.findings.push(Finding::new(severity, measured, advice));
    }

    /// Adds a warning if there is advice, or else a good finding.
    fn advise(&mut self, measured: String, advice: &str) {
        let severity = match advice {
            "" => Severity::Good,
            _ => Severity::Warning,
        };
        self.add(severity, measured, advice);
    }

    fn failed(&mut self, error: &ClusterError) {
        let advice = match error {
            ClusterError::Engine {
                error: EngineError::Unknown(_),
                ..
            } => {
                "check the addresses, the certificates and the network: a round trip to most servers of etcd must take well below 0.5 s"
            }
            ClusterError::Engine { .. } => "check the addresses, the certificates and the network",
            _ => "",
        };
        self.add(Severity::Failure, error.to_string(), advice);
    }
}

/// Checks the engine and the cluster: versions, voters, the time of commits, the quota, the leader,
/// clocks and settings. Writes a key of its own some times and deletes it. Asks the leader for a
/// sign of life, as followers do, and waits for it for [`limits::CHECK_SIGN_OF_LIFE`].
///
/// `now_ms` is the wall clock of this host in milliseconds since 1970, right now. `quota_bytes` is
/// the quota that the hosts assume; a server of etcd 3.6 or later reports its own.
pub async fn check(access: &Access, now_ms: u64, quota_bytes: u64) -> Report {
    let began = access.clock.now();
    let wall_ms = || now_ms + (access.clock.now() - began).as_millis() as u64;
    let mut report = Report::default();
    if let Ok(findings) = access.engine.examine().await {
        report.findings.extend(findings);
    }
    let status = match access.status().await {
        Ok(status) => status,
        Err(error) => {
            report.failed(&error);
            return report;
        }
    };
    // Servers that do not answer may have taken seconds.
    let from_ms = wall_ms();
    let before = access.head().await;
    let snapshot = before.as_ref().ok().and_then(|it| it.snapshot);
    check_voters(&mut report, &status);
    check_quota(
        &mut report,
        &status,
        quota_bytes,
        snapshot.map(|it| it.bytes),
    );
    check_alarms(&mut report, &status);
    if let Err(error @ ClusterError::Engine { .. }) = &before {
        // Other calls would fail as well, each after some time.
        report.failed(error);
        return report;
    }
    let commits = check_commits(&mut report, access).await;
    let wall = (from_ms, wall_ms);
    if let Err(error) = check_head(&mut report, access, before, commits, wall).await {
        report.failed(&error);
    }
    match members(access).await {
        Ok(members) => check_members(&mut report, &members),
        Err(error) => report.failed(&error),
    }
    report
}

fn check_voters(report: &mut Report, status: &Status) {
    let advice = match status.voters {
        0..=2 => "use three voters: with fewer the loss of one machine stops the cluster",
        voters if voters % 2 == 0 => "use an odd number: the last voter adds cost but no safety",
        _ => "",
    };
    let measured = format!("the number of voters of etcd is {}", status.voters);
    report.advise(measured, advice);
}

/// Judges the use of the quota as the leader does. The size of the snapshot says how much room the
/// next one needs; without a snapshot this is unknown and counts as nothing.
fn check_quota(
    report: &mut Report,
    status: &Status,
    quota_bytes: u64,
    snapshot_bytes: Option<u64>,
) {
    let quota = status.quota_bytes.unwrap_or(quota_bytes);
    let room = limits::room_bytes(quota);
    let measured = format!(
        "etcd uses {} MB, with free pages {} MB, of a quota of {} MB{}",
        status.bytes >> 20,
        status.file_bytes >> 20,
        quota >> 20,
        match status.quota_bytes {
            Some(_) => "",
            None => " (as the hosts assume; this etcd does not report it)",
        }
    );
    // Whether state may grow, also after it has grown by so many bytes.
    let has_room = |next: u64, by: u64| {
        space::has_room(
            quota,
            status.bytes.saturating_add(by),
            next.saturating_add(by),
        )
    };
    let next = snapshot_bytes.unwrap_or(0);
    if !has_room(next, 0) {
        let advice = "the hosts accept only removals: raise etcd's --quota-backend-bytes";
        return report.add(Severity::Failure, measured, advice);
    }
    let advice = if status.file_bytes >= room && status.bytes < room {
        "run `etcdctl defrag` on one server after another, since etcd counts free pages"
    } else if !has_room(next, next) || status.bytes >= room / 2 {
        "raise etcd's --quota-backend-bytes before the state doubles"
    } else if quota < limits::QUOTA_BYTES_ADVISED {
        "raise etcd's --quota-backend-bytes to 1 GiB or more: under load, writes are refused for seconds until etcd has removed the log before a snapshot"
    } else {
        ""
    };
    report.advise(measured, advice);
}

fn check_alarms(report: &mut Report, status: &Status) {
    for alarm in &status.alarms {
        let measured = format!("etcd reports {:?}", alarm.trim());
        let advice = if alarm.contains("NOSPACE") {
            "delete what is not needed or raise --quota-backend-bytes, then run `etcdctl defrag` and `etcdctl alarm disarm`"
        } else {
            "look into the log of this server of etcd"
        };
        report.add(Severity::Failure, measured, advice);
    }
}

/// Measures commits on a key of their own. Returns false if there can be none.
async fn check_commits(report: &mut Report, access: &Access) -> bool {
    let key = access.keys.check();
    let mut times = Vec::with_capacity(limits::CHECK_WRITES);
    for number in 0..limits::CHECK_WRITES {
        let value = Bytes::from(format!("check {number}"));
        let write = put(key.clone(), value);
        let began = access.clock.now();
        if let Err(error) = access.transact("measuring a commit", &write).await {
            report.failed(&error);
            return false;
        }
        times.push(access.clock.now().saturating_sub(began));
    }
    let what = "deleting the key of the check";
    if let Err(error) = access.transact(what, &delete(key)).await {
        report.failed(&error);
        return false;
    }
    times.sort_unstable();
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    let is_slow = median > limits::CHECK_MEDIAN || worst > limits::CHECK_WORST;
    let millis = |it: Duration| it.as_secs_f64() * 1e3;
    let measured = format!(
        "{} commits took {:.1} ms in the median and {:.1} ms at most",
        times.len(),
        millis(median),
        millis(worst)
    );
    let advice = match is_slow {
        true => "give etcd an SSD of its own and a network with less latency",
        false => "",
    };
    report.advise(measured, advice);
    true
}

/// Checks the leader and its clock. `before` is the head after `from_ms` by the wall clock of this
/// host. Fails if the head cannot be read, or the leader cannot be asked although etcd takes
/// `commits`.
async fn check_head(
    report: &mut Report,
    access: &Access,
    before: Result<Head, ClusterError>,
    commits: bool,
    (from_ms, wall_ms): (u64, impl Fn() -> u64),
) -> Result<(), ClusterError> {
    let before = before?;
    if commits {
        ask_for_sign_of_life(access, &before).await?;
    }
    let after = next_head(access, &before, commits).await?;
    let until_ms = wall_ms();
    check_leader(report, commits.then_some(&before), &after);
    check_clock(report, &before, &after, (from_ms, until_ms));
    Ok(())
}

/// Asks the leader of this head for a change of it, as a follower does that suspects the leader. A
/// leader that handed over is not asked.
async fn ask_for_sign_of_life(access: &Access, head: &Head) -> Result<(), ClusterError> {
    if head.released {
        return Ok(());
    }
    let challenge = put(access.keys.challenge(), Bytes::from_static(b"check"));
    let what = "asking the leader for a sign of life";
    access.transact(what, &challenge).await.map(drop)
}

/// Reads the head. Waits for another one than `before` if its leader was asked for that, and for
/// another leader after a handover.
async fn next_head(access: &Access, before: &Head, was_asked: bool) -> Result<Head, ClusterError> {
    let began = access.clock.now();
    loop {
        let head = access.head().await?;
        let has_led = !head.leader.is_empty();
        let waits = was_asked && has_led && (head.released || head.order() == before.order());
        let waited = access.clock.now().saturating_sub(began);
        if !waits || waited >= limits::CHECK_SIGN_OF_LIFE {
            return Ok(head);
        }
        access.clock.sleep(RETRY).await;
    }
}

/// Judges the leader by the head before and after it was asked for a sign of life. If it was not,
/// there is no head `before`.
fn check_leader(report: &mut Report, before: Option<&Head>, head: &Head) {
    if head.leader.is_empty() {
        let measured = "the cluster has no leader yet".to_owned();
        report.add(Severity::Warning, measured, "start a host");
    } else if head.released {
        let measured = match head.successor() {
            Some(host) => format!("{host} is to lead next and has not taken over"),
            None => format!("{} has handed over and no host has taken over", head.leader),
        };
        let advice = "start a host that has every policy";
        report.add(Severity::Failure, measured, advice);
    } else if before.is_none() {
        let measured = format!("{} was the last leader and was not asked", head.leader);
        report.add(Severity::Warning, measured, "");
    } else if before.is_some_and(|it| head.order() == it.order()) {
        let measured = format!(
            "{} was the last leader and gives no sign of life",
            head.leader
        );
        let advice = "start a host, or look into the logs of the hosts that run";
        report.add(Severity::Failure, measured, advice);
    } else {
        let measured = format!("{} leads in epoch {}", head.leader, head.epoch);
        report.add(Severity::Good, measured, "");
        report.leader = Some((head.leader.clone(), head.address.clone()));
    }
}

/// Compares the wall clock of this host with that of the leader.
///
/// The time in a head is the last one that the store of the leader has read. If the store is idle,
/// that may be long ago. So a clock of this host that is ahead can be found only if the leader
/// wrote a frame between the two heads: the store read its clock for it after `from_ms`, or a
/// commit earlier. Otherwise only a clock of this host that is behind can be found.
fn check_clock(report: &mut Report, before: &Head, after: &Head, (from_ms, until_ms): (u64, u64)) {
    if after.leader.is_empty() {
        return;
    }
    let ahead_ms = after.now_ms.saturating_sub(until_ms);
    let has_frame = after.seq > before.seq;
    let behind_ms = match has_frame {
        true => from_ms.saturating_sub(after.now_ms.saturating_add(limits::CHECK_CLOCK_SLACK_MS)),
        false => 0,
    };
    let measured = match (ahead_ms, behind_ms) {
        (0, 0) if has_frame => "the clocks of this host and of the leader agree".to_owned(),
        (0, 0) => format!(
            "the leader's last change is {} s old by this host's clock; its clock is not behind",
            until_ms.saturating_sub(after.now_ms) / 1000
        ),
        (0, behind) => format!("this host's clock is at least {behind} ms ahead of the leader's"),
        (ahead, _) => format!("this host's clock is at least {ahead} ms behind the leader's"),
    };
    let advice = match ahead_ms.max(behind_ms) > limits::CLOCK_OFFSET_MS_MAX {
        true => "synchronize both clocks with NTP",
        false => "",
    };
    report.advise(measured, advice);
}

fn check_members(report: &mut Report, members: &[MemberEntry]) {
    for entry in members {
        let info = match &entry.info {
            Ok(info) => info,
            Err(error) => {
                let measured = format!("the record of host {:?}: {error}", entry.host);
                report.add(Severity::Warning, measured, "update this program");
                continue;
            }
        };
        let missing = info.description.missing_modules.len();
        if missing > 0 {
            let measured = format!("host {} lacks {missing} policy modules", info.host);
            let advice =
                "it cannot lead: run `statehouse policy load` at the leader again for each";
            report.add(Severity::Warning, measured, advice);
        }
        if info.log_format < LOG_FORMAT {
            let measured = format!("host {} reads logs up to {}", info.host, info.log_format);
            report.add(Severity::Warning, measured, "update it");
        }
    }
    let mut infos = members.iter().filter_map(|it| it.info.as_ref().ok());
    let Some(first) = infos.next() else { return };
    let differs = |it: &&MemberInfo| it.description.settings != first.description.settings;
    if let Some(other) = infos.find(differs) {
        let measured = format!("{} and {} have different settings", first.host, other.host);
        let advice = format!(
            "give all hosts the same {AGREEING_SETTINGS}, since they change responses, or remove records of old hosts"
        );
        report.add(Severity::Warning, measured, &advice);
    } else {
        let measured = format!("{} hosts have records, with equal settings", members.len());
        report.add(Severity::Good, measured, "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(used_mib: u64, snapshot_mib: Option<u64>) -> (Severity, String) {
        let status = Status {
            bytes: used_mib << 20,
            file_bytes: used_mib << 20,
            ..Status::default()
        };
        let mut report = Report::default();
        let snapshot_bytes = snapshot_mib.map(|it| it << 20);
        check_quota(&mut report, &status, 2 << 30, snapshot_bytes);
        (report.worst(), report.to_string())
    }

    #[test]
    fn room_is_judged_by_the_next_snapshot() {
        for (used, snapshot, expected) in [
            // The next snapshot would not fit beside the last one.
            (850, Some(850), Severity::Failure),
            (500, Some(500), Severity::Warning),
            (200, Some(200), Severity::Good),
            // Most of the quota, but the next snapshot needs little.
            (1_638, Some(10), Severity::Warning),
            (1_790, Some(10), Severity::Failure),
            (850, None, Severity::Warning),
            // No module is stored any more, but the leader still accepts writes.
            (1_638, None, Severity::Warning),
            (1_800, None, Severity::Failure),
        ] {
            let (found, report) = room(used, snapshot);
            assert_eq!(found, expected, "{report}");
        }
        // In use, so that a defragmentation would not help.
        assert!(!room(1_638, Some(10)).1.contains("defrag"));
    }

    /// The end of an alarm that reports damage would hide the damage.
    #[test]
    fn only_the_alarm_of_a_full_engine_is_to_be_disarmed() {
        let alarms = ["memberID:1 alarm:NOSPACE ", "memberID:2 alarm:CORRUPT "];
        let status = Status {
            alarms: alarms.map(str::to_owned).to_vec(),
            ..Status::default()
        };
        let mut report = Report::default();
        check_alarms(&mut report, &status);
        let disarms = report
            .findings
            .iter()
            .map(|it| it.advice.contains("disarm"));
        assert_eq!(disarms.collect::<Vec<_>>(), [true, false], "{report}");
    }

    #[test]
    fn advice_names_latency_if_no_answer_is_in_time() {
        let advice = |error| {
            let mut report = Report::default();
            let what = "reading the head";
            report.failed(&ClusterError::Engine { what, error });
            report.to_string()
        };
        let late = advice(EngineError::Unknown("no answer within 500ms".into()));
        assert!(late.contains("a round trip to most servers"), "{late}");
        let refused = advice(EngineError::Refused("permission denied".into()));
        assert!(!refused.contains("round trip"), "{refused}");
    }

    #[test]
    fn clock_is_called_ahead_only_by_a_new_frame() {
        let before = Head {
            leader: "a".to_owned(),
            ..Head::first(crate::Id([1; 16]), 1_000)
        };
        for (frames, now_ms, times, expected) in [
            (1, 2_000, (1_990, 2_010), "of the leader agree"),
            (1, 2_000, (90_000, 90_010), "at least 87500 ms ahead of"),
            (1, 2_000, (1_000, 1_010), "at least 990 ms behind"),
            // The leader read its clock before this host did, and its commit came later.
            (1, 2_000, (2_400, 2_410), "of the leader agree"),
            // The store of an idle leader read its clock at some time after the last frame.
            (0, 2_000, (90_000, 91_000), "last change is 89 s old"),
            (0, 2_000, (1_000, 1_010), "at least 990 ms behind"),
        ] {
            let after = Head {
                change: before.change + 1,
                seq: before.seq + frames,
                now_ms,
                ..before.clone()
            };
            let mut report = Report::default();
            check_clock(&mut report, &before, &after, times);
            assert!(report.to_string().contains(expected), "{report}");
        }
    }
}
