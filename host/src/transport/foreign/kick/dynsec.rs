//! Mosquitto's dynamic security as a way to kick: it disables a user name, which ends all connections of that user
//! (DISCONNECT 0x98) and refuses new ones, and enables it after [`limits::KICK_TIME`].
//!
//! What enters: clients that broke a rule, and answers of the plug-in. What leaves: orders to it. Who is disabled stands
//! in a file before the order leaves, so that nobody stays locked out by a crash: whoever stands there when the store
//! attaches is enabled. It never disables the store's own user, and nobody while the plug-in does not answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::{Kick, Post};
use crate::limits;

const ORDERS: &str = "$CONTROL/dynamic-security/v1";
const ANSWERS: &str = "$CONTROL/dynamic-security/v1/response";

/// The name of the file in the data directory.
const FILE: &str = "kicked-users";

/// Longer than any wait: asked again when something happens.
const IDLE: Duration = Duration::from_secs(3600);

/// Why nobody can be kicked.
const SILENT: &str = "the broker does not answer on $CONTROL/dynamic-security/v1. Its plug-in has to be loaded, and the store's user has to be allowed to publish there and to subscribe to the response";

/// Why users that an earlier run disabled cannot be told.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}. It names users that this store has disabled: enable them with `mosquitto_ctrl dynsec enableClient`, then remove it", path.display())]
pub struct KickedError {
    path: PathBuf,
    error: io::Error,
}

/// Disables users for a while.
pub struct DynamicSecurity {
    post: Arc<dyn Post>,
    own_user: Option<String>,
    /// In front of what comes back with an answer: everybody's answers come on one topic.
    mark: String,
    file: Option<PathBuf>,
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    /// The user names of connected clients.
    users: HashMap<Box<str>, Box<str>>,
    /// Users to be disabled, as soon as they stand in the file.
    wanted: BTreeSet<String>,
    /// Users that may be disabled, and when they are to be enabled, or once more.
    disabled: BTreeMap<String, Instant>,
    /// Whether the plug-in has answered on this connection.
    answers: bool,
    /// When to say that it has not.
    patience: Option<Instant>,
    /// Nobody is disabled any more.
    leaving: bool,
    /// The file names somebody who is enabled.
    stale: bool,
    /// When something was said of a kick that could not be.
    complained: Option<Instant>,
}

impl DynamicSecurity {
    /// Orders through `post`, in the name of `own_user`. In `data` stands who is disabled; without a directory users are
    /// kicked only, and may come back at once.
    pub fn new(
        post: Arc<dyn Post>,
        own_user: Option<String>,
        data: Option<&Path>,
    ) -> Result<Arc<Self>, KickedError> {
        let file = data.map(|data| data.join(FILE));
        let names = match &file {
            Some(path) => load(path).map_err(|error| KickedError {
                path: path.clone(),
                error,
            })?,
            None => BTreeSet::new(),
        };
        let now = Instant::now();
        let state = State {
            disabled: names.into_iter().map(|user| (user, now + IDLE)).collect(),
            ..State::default()
        };
        Ok(Arc::new(Self {
            post,
            own_user,
            mark: format!("statehouse-{} ", std::process::id()),
            file,
            state: Mutex::new(state),
            wake: Notify::new(),
        }))
    }

    /// Does what is to be done, until it is dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            let this = Arc::clone(&self);
            // Writing a file blocks.
            let next = tokio::task::spawn_blocking(move || this.work(Instant::now())).await;
            let Ok(next) = next else {
                tracing::error!("nobody is kicked any more: that is a bug");
                return;
            };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    /// Disables who is to be disabled and enables whose time has come. When to come back.
    fn work(&self, now: Instant) -> Instant {
        let (wanted, names) = {
            let mut state = self.lock();
            let wanted = std::mem::take(&mut state.wanted);
            for user in &wanted {
                state.disabled.insert(user.clone(), now + limits::KICK_TIME);
            }
            let names: BTreeSet<String> = state.disabled.keys().cloned().collect();
            (wanted, names)
        };
        let saved = match &self.file {
            Some(path) => save(path, &names)
                .map_err(|error| tracing::error!(%error, "cannot write {}", path.display())),
            None => Ok(()),
        };
        let mut state = self.lock();
        state.stale = saved.is_err() || state.disabled.len() < names.len();
        for user in &wanted {
            if saved.is_err() || state.leaving {
                state.stale |= state.disabled.remove(user).is_some();
                continue;
            }
            tracing::warn!(
                user = %user.escape_debug(),
                "kicking a user for a client that broke a rule; it is enabled again in {:?}",
                limits::KICK_TIME
            );
            self.order(&[self.command("disableClient", user)]);
        }
        if state.patience.is_some_and(|at| at <= now) {
            state.patience = None;
            tracing::warn!("nobody can be kicked: {SILENT}");
        }
        self.enable(&mut state, now);
        let next = state.disabled.values().chain(&state.patience).min();
        next.copied().unwrap_or(now + IDLE)
    }

    /// Enables whose time has come, and once more those of whom the broker has said nothing.
    fn enable(&self, state: &mut State, now: Instant) {
        for (user, at) in &mut state.disabled {
            if *at <= now {
                self.order(&[self.command("enableClient", user)]);
                *at = now + limits::KICK_RETRY;
            }
        }
    }

    fn command(&self, command: &str, user: &str) -> Value {
        json!({"command": command, "username": user, "correlationData": format!("{}{user}", self.mark)})
    }

    fn order(&self, commands: &[Value]) {
        let order = json!({ "commands": commands }).to_string();
        self.post.post(ORDERS, order.into());
    }

    /// Says why somebody is not kicked: clients cause it, so not more often than once a second.
    fn complain(&self, state: &mut State, client: &str, why: &str) {
        let now = Instant::now();
        let recent = |at: Instant| now.duration_since(at) < Duration::from_secs(1);
        if !state.complained.is_some_and(recent) {
            state.complained = Some(now);
            tracing::warn!(client = %client.escape_debug(), "cannot kick a client: {why}");
        }
    }

    fn answer(&self, state: &mut State, answer: &Answer) {
        let user = answer.correlation_data.as_deref();
        let Some(user) = user.and_then(|it| it.strip_prefix(&self.mark)) else {
            return;
        };
        if !state.answers {
            state.answers = true;
            state.patience = None;
            tracing::info!("mosquitto's dynamic security kicks who breaks a rule");
        }
        let failed = answer.error.as_deref();
        let shown = user.escape_debug();
        match (answer.command.as_str(), failed) {
            ("disableClient", None) => return,
            ("disableClient", Some(error)) => {
                tracing::error!(user = %shown, error, "mosquitto does not disable a user");
            }
            ("enableClient", None) => tracing::info!(user = %shown, "a user is enabled again"),
            ("enableClient", Some(error)) => {
                tracing::error!(user = %shown, error, "mosquitto does not enable a user that was kicked: do it with `mosquitto_ctrl dynsec enableClient`");
            }
            _ => return,
        }
        state.stale |= state.disabled.remove(user).is_some();
        self.wake.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update under this lock is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kick for DynamicSecurity {
    fn filters(&self) -> &'static [&'static str] {
        &[ANSWERS]
    }

    fn read(&self, topic: &str, payload: &[u8]) {
        // Answers to others may be long lists; those to the store are not.
        if topic != ANSWERS || payload.len() > limits::KICK_ANSWER_BYTES_MAX {
            return;
        }
        if let Ok(answers) = serde_json::from_slice::<Answers>(payload) {
            let mut state = self.lock();
            for answer in &answers.responses {
                self.answer(&mut state, answer);
            }
        }
    }

    fn came(&self, client: &str, user: &str) {
        let mut state = self.lock();
        if state.users.len() < limits::KICK_CLIENTS_MAX {
            state.users.insert(client.into(), user.into());
        }
    }

    fn gone(&self, client: &str) {
        self.lock().users.remove(client);
    }

    fn attached(&self) {
        let mut state = self.lock();
        state.answers = false;
        // Who came or went meanwhile is not known.
        state.users.clear();
        let now = Instant::now();
        state.patience = Some(now + limits::KICK_ANSWER_WAIT);
        state.disabled.values_mut().for_each(|at| *at = now);
        drop(state);
        // A question that changes nothing shows whether it is there at all.
        self.order(&[json!({"command": "getDefaultACLAccess", "correlationData": self.mark})]);
        self.wake.notify_one();
    }

    fn kick(&self, client: &str) {
        let mut state = self.lock();
        let Some(user) = state.users.get(client).map(|user| user.to_string()) else {
            let why = "its user name is not known from the broker's connection log";
            return self.complain(&mut state, client, why);
        };
        if !state.answers {
            return self.complain(&mut state, client, SILENT);
        }
        if self.own_user.as_ref() == Some(&user) {
            let why = "it has the user name of the store itself";
            return self.complain(&mut state, client, why);
        }
        if self.file.is_none() {
            // Nothing would be left to tell the next run: so the user is enabled at once, in the same order.
            drop(state);
            self.order(&[
                self.command("disableClient", &user),
                self.command("enableClient", &user),
            ]);
            return;
        }
        if state.disabled.contains_key(&user) || state.wanted.contains(&user) {
            return;
        }
        if state.disabled.len() + state.wanted.len() >= limits::KICKED_USERS_MAX {
            let why = "too many users are disabled as it is";
            return self.complain(&mut state, client, why);
        }
        state.wanted.insert(user);
        self.wake.notify_one();
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.leaving = true;
        let now = Instant::now();
        state.disabled.values_mut().for_each(|at| *at = now);
        // Not by the task: whoever calls waits for what is on its way to the broker now.
        self.enable(&mut state, now);
    }

    fn has_left(&self) -> bool {
        let state = self.lock();
        state.disabled.is_empty() && !state.stale
    }
}

/// What the plug-in publishes.
#[derive(Deserialize)]
struct Answers {
    responses: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    command: String,
    error: Option<String>,
    #[serde(rename = "correlationData")]
    correlation_data: Option<String>,
}

/// Who stands in the file.
fn load(path: &Path) -> io::Result<BTreeSet<String>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        file => file?,
    };
    let mut text = String::new();
    file.take(limits::KICKED_FILE_BYTES_MAX)
        .read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(io::Error::from)
}

/// Writes who stands in the file. It is durable when this returns.
fn save(path: &Path, names: &BTreeSet<String>) -> io::Result<()> {
    if names.is_empty() {
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed?,
        }
    } else {
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(names)?)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
    }
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mosquitto, as far as it matters: it notes orders.
    #[derive(Default)]
    struct Broker(Mutex<Vec<(String, String)>>);

    impl Post for Broker {
        fn post(&self, topic: &str, payload: bytes::Bytes) {
            assert_eq!(topic, ORDERS);
            let order: Value = serde_json::from_slice(&payload).unwrap();
            let word = |command: &Value, key| command[key].as_str().unwrap_or_default().to_owned();
            let mut orders = self.0.lock().unwrap();
            for command in order["commands"].as_array().unwrap() {
                orders.push((word(command, "command"), word(command, "username")));
            }
        }
    }

    impl Broker {
        fn orders(&self) -> Vec<String> {
            let orders = std::mem::take(&mut *self.0.lock().unwrap());
            let shown = orders
                .iter()
                .map(|(command, user)| format!("{command} {user}"));
            shown.collect()
        }
    }

    struct Set {
        broker: Arc<Broker>,
        kick: Arc<DynamicSecurity>,
    }

    impl Set {
        fn over(data: Option<&Path>) -> Set {
            let broker = Arc::new(Broker::default());
            let kick = DynamicSecurity::new(broker.clone(), Some("store".into()), data).unwrap();
            let set = Set { broker, kick };
            set.kick.attached();
            set
        }

        fn answer(&self, command: &str, user: &str, error: Option<&str>) {
            let mut answer =
                json!({"command": command, "correlationData": format!("{}{user}", self.kick.mark)});
            if let Some(error) = error {
                answer["error"] = error.into();
            }
            let answers = json!({"responses": [answer]}).to_string();
            self.kick.read(ANSWERS, answers.as_bytes());
        }

        /// Attached, with a plug-in that answers, and a client of a user.
        fn ready(data: Option<&Path>) -> Set {
            let set = Set::over(data);
            set.answer("getDefaultACLAccess", "", None);
            set.kick.came("thermostat", "joe");
            set.broker.orders();
            set
        }
    }

    fn in_file(data: &Path) -> String {
        fs::read_to_string(data.join(FILE)).unwrap_or_default()
    }

    #[test]
    fn a_user_is_disabled_for_a_while() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.kick("thermostat");
        let now = Instant::now();
        let next = set.kick.work(now);
        assert_eq!(set.broker.orders(), ["disableClient joe"]);
        assert_eq!(in_file(data.path()), r#"["joe"]"#);
        assert_eq!(next, now + limits::KICK_TIME);
        set.answer("disableClient", "joe", None);
        // A second offence meanwhile makes it no longer.
        set.kick.kick("thermostat");
        assert_eq!(set.kick.work(now), next);
        assert!(set.broker.orders().is_empty());

        set.kick.work(next);
        assert_eq!(set.broker.orders(), ["enableClient joe"]);
        assert_eq!(in_file(data.path()), r#"["joe"]"#);
        set.answer("enableClient", "joe", None);
        set.kick.work(next);
        assert!(!data.path().join(FILE).exists());
        assert!(set.broker.orders().is_empty());
    }

    #[test]
    fn who_was_disabled_when_the_store_crashed_is_enabled_by_the_next_run() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());

        let set = Set::over(Some(data.path()));
        set.kick.work(Instant::now());
        assert_eq!(
            set.broker.orders(),
            ["getDefaultACLAccess ", "enableClient joe"]
        );
        // Not heard: again later, and after another connection at once.
        set.kick.work(Instant::now() + limits::KICK_RETRY);
        assert_eq!(set.broker.orders(), ["enableClient joe"]);
        set.kick.attached();
        set.kick.work(Instant::now());
        assert_eq!(set.broker.orders().last().unwrap(), "enableClient joe");
        set.answer("enableClient", "joe", Some("Client not found"));
        set.kick.work(Instant::now());
        assert!(!data.path().join(FILE).exists());
    }

    #[test]
    fn nobody_is_disabled_who_does_not_stand_in_the_file() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        data.close().unwrap();
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        assert!(set.broker.orders().is_empty());
        // Nor is there anybody to enable.
        set.kick.work(Instant::now() + limits::KICK_TIME);
        assert!(set.broker.orders().is_empty());
    }

    #[test]
    fn who_cannot_be_kicked_is_not() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.came("console", "store");
        set.kick.came("left", "jim");
        set.kick.gone("left");
        for client in ["nobody", "console", "left"] {
            set.kick.kick(client);
        }
        set.kick.work(Instant::now());
        assert!(set.broker.orders().is_empty());
        // Another connection, and it is not known yet whether the plug-in is there.
        set.kick.attached();
        set.kick.came("thermostat", "joe");
        set.broker.orders();
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        assert!(set.broker.orders().is_empty());
    }

    #[test]
    fn silence_is_noticed_once() {
        let set = Set::over(None);
        let now = Instant::now();
        let next = set.kick.work(now);
        assert!(next > now && next <= now + limits::KICK_ANSWER_WAIT);
        assert_eq!(set.kick.work(next), next + IDLE);
        let set = Set::ready(None);
        assert_eq!(set.kick.work(now), now + IDLE);
    }

    #[test]
    fn what_the_plug_in_refuses_is_forgotten() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        set.answer("disableClient", "joe", Some("Client not found"));
        set.kick.work(Instant::now());
        assert!(!data.path().join(FILE).exists());
    }

    #[test]
    fn answers_to_others_change_nothing() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        let mark = &set.kick.mark;
        for answers in [
            r#"{"responses":[{"command":"enableClient"}]}"#.to_owned(),
            r#"{"responses":[{"command":"enableClient","correlationData":"joe"}]}"#.to_owned(),
            format!(
                r#"{{"responses":[{{"command":"deleteClient","correlationData":"{mark}joe"}}]}}"#
            ),
            format!(
                r#"{{"responses":[{{"command":"enableClient","correlationData":"{mark}joe"}}],"x":"{}"}}"#,
                "x".repeat(limits::KICK_ANSWER_BYTES_MAX)
            ),
            "nonsense".to_owned(),
        ] {
            set.kick.read(ANSWERS, answers.as_bytes());
        }
        set.answer("enableClient", "jim", None);
        set.kick.work(Instant::now());
        assert_eq!(in_file(data.path()), r#"["joe"]"#);
    }

    #[test]
    fn without_a_directory_a_user_may_come_back_at_once() {
        let set = Set::ready(None);
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        assert_eq!(
            set.broker.orders(),
            ["disableClient joe", "enableClient joe"]
        );
    }

    #[test]
    fn a_store_that_leaves_leaves_nobody_locked_out() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        set.kick.kick("thermostat");
        set.kick.work(Instant::now());
        set.broker.orders();
        set.kick.came("another", "jim");
        set.kick.kick("another");
        set.kick.leave();
        set.kick.work(Instant::now());
        assert_eq!(set.broker.orders(), ["enableClient joe"]);
        assert!(!set.kick.has_left());
        set.answer("enableClient", "joe", None);
        assert!(!set.kick.has_left());
        set.kick.work(Instant::now());
        assert!(set.kick.has_left());
        assert!(!data.path().join(FILE).exists());
    }

    #[test]
    fn a_file_of_nonsense_is_shown_to_somebody() {
        let data = tempfile::tempdir().unwrap();
        fs::write(data.path().join(FILE), "joe").unwrap();
        let post = Arc::new(Broker::default());
        let error = DynamicSecurity::new(post, None, Some(data.path())).err();
        assert!(error.unwrap().to_string().contains("enableClient"));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        for n in 0..=limits::KICK_CLIENTS_MAX {
            set.kick.came(&format!("c{n}"), &format!("u{n}"));
        }
        assert_eq!(set.kick.lock().users.len(), limits::KICK_CLIENTS_MAX);
        for n in 0..=limits::KICKED_USERS_MAX {
            set.kick.kick(&format!("c{n}"));
        }
        set.kick.work(Instant::now());
        assert_eq!(set.broker.orders().len(), limits::KICKED_USERS_MAX);
        let file = fs::metadata(data.path().join(FILE)).unwrap();
        assert!(file.len() < limits::KICKED_FILE_BYTES_MAX);
    }

    #[tokio::test]
    async fn it_works_by_itself() {
        let data = tempfile::tempdir().unwrap();
        let set = Set::ready(Some(data.path()));
        let running = tokio::spawn(Arc::clone(&set.kick).run());
        set.kick.kick("thermostat");
        let until = Instant::now() + Duration::from_secs(10);
        while set.broker.0.lock().unwrap().is_empty() {
            assert!(Instant::now() < until);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(set.broker.orders(), ["disableClient joe"]);
        running.abort();
    }
}
