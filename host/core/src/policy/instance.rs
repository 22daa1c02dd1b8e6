//! One instance of a policy. It runs calls within their fuel, and is replaced after a failure.

use std::sync::Arc;

use bytes::Bytes;
use wasmtime::Store;

use super::bindings;
use super::budget::{self, Account, Failure};
use super::digest::Digest;
use super::engine::{LoadError, Policy};
use super::guest::{self, Guest, Host, Phase};
use super::{Change, Dialect, Info, Notification, Outcome, Request, Span};
use crate::{clock, limits};

/// A long-lived instance. wasmtime never enters an instance again after a trap, so it is dropped
/// and the next call starts a new one.
pub struct Instance<H: Host> {
    policy: Arc<Policy<H>>,
    live: Option<Live<H>>,
}

pub(super) struct Live<H: Host> {
    store: Store<Guest<H>>,
    bindings: bindings::Policy,
}

impl<H: Host> Live<H> {
    /// The fuel that a call has used of `fuel`: instructions, and the work of the host.
    pub(super) fn fuel_used(&self, fuel: u64) -> u64 {
        // Our engine always counts fuel.
        let instructions = fuel.saturating_sub(self.store.get_fuel().unwrap_or(0));
        instructions.saturating_add(self.store.data().account.charged())
    }
}

impl<H: Host> Instance<H> {
    /// Creates an instance that starts with its first call.
    pub fn new(policy: Arc<Policy<H>>) -> Self {
        Self { policy, live: None }
    }

    /// Creates an instance that has already started.
    pub fn warm(policy: Arc<Policy<H>>) -> Result<Self, LoadError> {
        let (live, _) = Self::start(&policy, 0, false)?;
        Ok(Self {
            policy,
            live: Some(live),
        })
    }

    /// Whether it has started.
    pub fn is_warm(&self) -> bool {
        self.live.is_some()
    }

    /// Its linear memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        let live = self.live.as_ref();
        live.map_or(0, |live| live.store.data().bounds.memory_bytes())
    }

    /// The digest of its policy.
    pub fn digest(&self) -> Digest {
        self.policy.digest.into()
    }

    /// Asks the policy for the key of a request. Returns the key and the fuel used. The limit is
    /// `fuel_max`, in addition to the fuel for each byte. The guest may only log.
    pub fn route(
        &mut self,
        payload: &Bytes,
        now_ms: u64,
        fuel_max: u64,
    ) -> (Result<Option<Bytes>, Failure>, u64) {
        let mut live = match self.take_live(now_ms, false) {
            Ok(live) => live,
            Err(error) => return (Err(error.into()), 0),
        };
        let data = live.store.data_mut();
        (data.phase, data.now_ms, data.cause) = (Phase::Setup, now_ms, None);
        let fuel = budget::fuel(fuel_max, payload.len());
        data.account = Account::of(fuel);
        let filled = live.store.set_fuel(fuel);
        live.store.set_epoch_deadline(limits::EPOCH_TICKS_PER_CALL);
        let handler = live.bindings.statehouse_policy_handler();
        let routed = filled.and_then(|()| handler.call_route(&mut live.store, payload));
        let fuel_used = live.fuel_used(fuel);
        let key = match routed {
            Ok(_) if fuel_used > fuel => Err(Failure::Fuel),
            Ok(span) => span.map(|span| slice(payload, span)).transpose(),
            Err(error) => Err(failure(&mut live.store, &error)),
        };
        if key.is_ok() {
            self.live = Some(live);
        }
        (key, fuel_used)
    }

    /// Takes the live instance out, or starts one.
    fn take_live(&mut self, now_ms: u64, silent: bool) -> Result<Live<H>, LoadError> {
        match self.live.take() {
            Some(live) => Ok(live),
            None => Self::start(&self.policy, now_ms, silent).map(|(live, _)| live),
        }
    }

    /// The policy of this instance.
    pub fn policy(&self) -> &Arc<Policy<H>> {
        &self.policy
    }

    /// Starts an instance: calls `describe` and `configure`. An instance for re-executions does not
    /// log.
    pub(super) fn start(
        policy: &Policy<H>,
        now_ms: u64,
        silent: bool,
    ) -> Result<(Live<H>, Info), LoadError> {
        let guest = Guest::new(policy.counters.clone(), now_ms, silent);
        let mut store = Store::new(policy.pre.engine(), guest);
        store.limiter(|guest| &mut guest.bounds);
        // Lists of the guest may overlap, so one call could copy its memory several times.
        store.set_hostcall_fuel(limits::GUEST_MEMORY_BYTES_MAX);
        store
            .set_fuel(limits::FUEL_SETUP)
            .map_err(|error| LoadError::Trial("set-up", Failure::of(&error)))?;
        // Interpreters start slowly. A request waits for this only if no instance was warmed
        // before.
        store.set_epoch_deadline(limits::EPOCH_TICKS_PER_CALL * 20);
        let bindings = policy
            .pre
            .instantiate(&mut store)
            .map_err(|error| LoadError::Trial("its start", failure(&mut store, &error)))?;
        let handler = bindings.statehouse_policy_handler();
        let info = handler
            .call_describe(&mut store)
            .map_err(|error| LoadError::Trial("describe", failure(&mut store, &error)))?;
        let configured = handler
            .call_configure(&mut store, &[])
            .map_err(|error| LoadError::Trial("configure", failure(&mut store, &error)))?;
        configured.map_err(|mut text| {
            // The text is used in logs, answers and a retained message.
            text.truncate(text.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX));
            LoadError::Configure(text)
        })?;
        Ok((Live { store, bindings }, info))
    }

    /// Begins a call: moves the host into the instance and sets the fuel.
    pub fn begin(&mut self, host: Box<H>, bytes: Bytes) -> Call<'_, H> {
        let (now_ms, silent) = (host.now_ms(), host.is_rerun());
        let fuel = budget::fuel(host.fuel_max(), bytes.len());
        let live = self.take_live(now_ms, silent);
        let mut call = Call {
            instance: self,
            host: None,
            failed: None,
            fuel,
            fuel_used: 0,
        };
        match live {
            Ok(mut live) => {
                let filled = live.store.set_fuel(call.fuel);
                live.store.set_epoch_deadline(limits::EPOCH_TICKS_PER_CALL);
                let data = live.store.data_mut();
                data.host = Some(host);
                data.account = Account::of(call.fuel);
                data.bytes = bytes;
                data.phase = Phase::Handle;
                (data.now_ms, data.silent) = (now_ms, silent);
                call.instance.live = Some(live);
                if let Err(error) = filled {
                    call.fail(Failure::of(&error));
                }
            }
            Err(error) => {
                call.host = Some(host);
                call.failed = Some(error.into());
            }
        }
        call
    }
}

/// A call in progress: `handle`, then any number of `notify`, with one fuel limit.
pub struct Call<'a, H: Host> {
    instance: &'a mut Instance<H>,
    /// The host, if there is no live instance to hold it.
    host: Option<Box<H>>,
    failed: Option<Failure>,
    /// The fuel limit.
    fuel: u64,
    /// The fuel used when the instance was dropped.
    fuel_used: u64,
}

impl<H: Host> Call<'_, H> {
    /// Calls the policy to handle a request.
    pub fn handle(&mut self, request: Request<'_>) -> Result<Outcome, Failure> {
        let outcome = self.enter(|live| {
            let handler = live.bindings.statehouse_policy_handler();
            let outcome = handler.call_handle(&mut live.store, request)?;
            live.store
                .data_mut()
                .account
                .moved(outcome.reply.head.len())?;
            Ok(outcome)
        })?;
        match self.check(&outcome) {
            Ok(()) => Ok(outcome),
            Err(failure) => Err(self.fail(failure)),
        }
    }

    /// Checks version and command, which clients and metrics get as they are. A re-execution is
    /// exempt: an earlier version of the program may have answered with these.
    fn check(&mut self, outcome: &Outcome) -> Result<(), Failure> {
        let host = self.host();
        if host.is_rerun() {
            return Ok(());
        }
        let version = outcome.version.map(clock::Stamp::from);
        if let Some(version) = version
            && !host.may_have_assigned(version)
        {
            return Err(Failure::Malformed(format!(
                "the version {}:{}, which the store cannot have assigned",
                version.wall, version.counter
            )));
        }
        self.check_command(outcome.command)
    }

    /// Fails if the policy does not declare the command of an outcome.
    pub fn check_command(&self, command: Option<u16>) -> Result<(), Failure> {
        let declared = self.instance.policy.commands.len();
        match command {
            Some(command) if usize::from(command) >= declared => Err(Failure::Malformed(format!(
                "the command {command}, and it declares {declared} commands from 0 on"
            ))),
            _ => Ok(()),
        }
    }

    /// Calls the policy to render a change in a dialect. Spans of the notification refer to its
    /// key.
    pub fn notify(
        &mut self,
        key: &Bytes,
        change: Change<'_>,
        dialect: Dialect,
    ) -> Result<Notification, Failure> {
        self.enter(|live| {
            let data = live.store.data_mut();
            data.phase = Phase::Notify;
            data.bytes = key.clone();
            let handler = live.bindings.statehouse_policy_handler();
            let notification = handler.call_notify(&mut live.store, change, dialect)?;
            let topic = notification.topic_prefix.len() + notification.topic_suffix.len();
            let account = &mut live.store.data_mut().account;
            account.import(0)?;
            account.moved(topic + notification.payload.head.len())?;
            Ok(notification)
        })
    }

    /// The host of this call.
    pub fn host(&mut self) -> &mut H {
        let live = self.instance.live.as_mut();
        let held = live
            .and_then(|live| live.store.data_mut().host.as_mut())
            .or(self.host.as_mut());
        held.expect("begin stores the host in one of the two places, and only end removes it")
    }

    /// The fuel used so far. It is the same on every machine.
    pub fn fuel_used(&self) -> u64 {
        match &self.instance.live {
            Some(live) => live.fuel_used(self.fuel),
            None => self.fuel_used,
        }
    }

    /// Drops the instance because its result violates the contract, as after a trap.
    pub fn discard(&mut self, failure: &Failure) {
        self.fail(failure.clone());
    }

    /// Ends the call and returns the host.
    pub fn end(mut self) -> Box<H> {
        let live = self.instance.live.as_mut();
        let held = live.and_then(|live| {
            let data = live.store.data_mut();
            // The payload must not stay in memory until the next request.
            data.bytes = Bytes::new();
            data.host.take()
        });
        held.or(self.host.take())
            .expect("begin stores the host in one of the two places, and only this removes it")
    }

    fn enter<T>(
        &mut self,
        call: impl FnOnce(&mut Live<H>) -> wasmtime::Result<T>,
    ) -> Result<T, Failure> {
        if let Some(failure) = &self.failed {
            return Err(failure.clone());
        }
        let Some(live) = &mut self.instance.live else {
            return Err(Failure::Trap("there is no instance".into()));
        };
        live.store.data_mut().cause = None;
        let done = call(live).map_err(|error| failure(&mut live.store, &error));
        match done {
            // Neither account alone exceeds the limit, but their sum does.
            Ok(_) if live.fuel_used(self.fuel) > self.fuel => Err(self.fail(Failure::Fuel)),
            done => done.map_err(|failure| self.fail(failure)),
        }
    }

    /// Drops the instance and keeps the host.
    fn fail(&mut self, failure: Failure) -> Failure {
        self.fuel_used = self.fuel_used();
        if let Some(mut live) = self.instance.live.take() {
            self.host = live.store.data_mut().host.take();
        }
        self.failed = Some(failure.clone());
        failure
    }
}

/// The failure of a call, with the cause that the policy logged.
fn failure<H: Host>(store: &mut Store<Guest<H>>, error: &wasmtime::Error) -> Failure {
    Failure::of(error).caused_by(store.data_mut().cause.take())
}

/// The part of `bytes` that a span refers to.
pub(crate) fn slice(bytes: &Bytes, span: Span) -> Result<Bytes, Failure> {
    guest::slice(bytes, span)
        .ok_or_else(|| Failure::Malformed("a span outside of the call's bytes".into()))
}
