//! One instance of a policy: calls it within its budget and is replaced after a failure.
//!
//! What enters: a host and the bytes of a call. What leaves: the host again, with what was staged,
//! and an outcome or a failure.

use std::sync::Arc;

use bytes::Bytes;
use wasmtime::Store;

use super::bindings;
use super::budget::{self, Account, Failure};
use super::digest::Digest;
use super::engine::{LoadError, Policy};
use super::guest::{self, Guest, Host, Phase};
use super::{Change, Dialect, Info, Notification, Outcome, Request, Span};
use crate::limits;

/// A long-lived instance. After a trap wasmtime never enters it again, so it is thrown away and the
/// next call starts a new one.
pub struct Instance<H: Host> {
    policy: Arc<Policy<H>>,
    live: Option<Live<H>>,
}

pub(super) struct Live<H: Host> {
    store: Store<Guest<H>>,
    bindings: bindings::Policy,
}

impl<H: Host> Live<H> {
    /// What a call that began with `fuel` has burnt: instructions, and the work of the host.
    pub(super) fn burnt(&self, fuel: u64) -> u64 {
        // An engine of ours always counts fuel.
        let instructions = fuel.saturating_sub(self.store.get_fuel().unwrap_or(0));
        instructions.saturating_add(self.store.data().account.charged())
    }
}

impl<H: Host> Instance<H> {
    /// An instance of `policy`; it starts with the first call.
    pub fn new(policy: Arc<Policy<H>>) -> Self {
        Self { policy, live: None }
    }

    /// An instance that has started already, so that its first call does not wait for that.
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

    /// The linear memory that it holds, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let live = self.live.as_ref();
        live.map_or(0, |live| live.store.data().bounds.memory_bytes())
    }

    /// The digest of its policy.
    pub fn digest(&self) -> Digest {
        self.policy.digest.into()
    }

    /// The key that a request is about, none where the policy finds none; and the fuel that this took, of `fuel_max` and the
    /// part for its bytes. It may log and nothing else.
    pub fn route(
        &mut self,
        payload: &Bytes,
        now_ms: u64,
        fuel_max: u64,
    ) -> (Result<Option<Bytes>, Failure>, u64) {
        let live = match self.live.take() {
            Some(live) => Ok(live),
            None => Self::start(&self.policy, now_ms, false).map(|(live, _)| live),
        };
        let mut live = match live {
            Ok(live) => live,
            Err(error) => return (Err(error.into()), 0),
        };
        let data = live.store.data_mut();
        (data.phase, data.now_ms) = (Phase::Setup, now_ms);
        let fuel = budget::fuel(fuel_max, payload.len());
        data.account = Account::of(fuel);
        let filled = live.store.set_fuel(fuel);
        live.store.set_epoch_deadline(limits::EPOCH_TICKS_PER_CALL);
        let handler = live.bindings.statehouse_policy_handler();
        let routed = filled.and_then(|()| handler.call_route(&mut live.store, payload));
        let burnt = live.burnt(fuel);
        let key = match routed {
            Ok(_) if burnt > fuel => Err(Failure::Fuel),
            Ok(span) => span.map(|span| slice(payload, span)).transpose(),
            Err(error) => Err(Failure::of(&error)),
        };
        if key.is_ok() {
            self.live = Some(live);
        }
        (key, burnt)
    }

    /// The policy it runs.
    pub fn policy(&self) -> &Arc<Policy<H>> {
        &self.policy
    }

    /// Starts an instance: describe, then configure, within the budget of a start. One for re-runs starts in silence.
    pub(super) fn start(
        policy: &Policy<H>,
        now_ms: u64,
        silent: bool,
    ) -> Result<(Live<H>, Info), LoadError> {
        let guest = Guest::new(policy.counters.clone(), now_ms, silent);
        let mut store = Store::new(policy.pre.engine(), guest);
        store.limiter(|guest| &mut guest.bounds);
        // Lists of the guest may overlap, so that one call could copy its memory several times.
        store.set_hostcall_fuel(limits::GUEST_MEMORY_BYTES_MAX);
        let trial = |stage| move |e: wasmtime::Error| LoadError::Trial(stage, Failure::of(&e));
        store
            .set_fuel(limits::FUEL_SETUP)
            .map_err(trial("set-up"))?;
        // Interpreters take their time to start. It is the path of a request only where nobody had an instance warmed.
        store.set_epoch_deadline(limits::EPOCH_TICKS_PER_CALL * 20);
        let bindings = policy
            .pre
            .instantiate(&mut store)
            .map_err(trial("its start"))?;
        let handler = bindings.statehouse_policy_handler();
        let info = handler
            .call_describe(&mut store)
            .map_err(trial("describe"))?;
        let configured = handler
            .call_configure(&mut store, &[])
            .map_err(trial("configure"))?;
        configured.map_err(|mut text| {
            // It goes into logs, answers and a retained message.
            text.truncate(text.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX));
            LoadError::Configure(text)
        })?;
        Ok((Live { store, bindings }, info))
    }

    /// Begins a call: hands over the host and fills the budget.
    pub fn begin(&mut self, host: H, bytes: Bytes) -> Call<'_, H> {
        let (now_ms, silent) = (host.now_ms(), host.is_rerun());
        let fuel = budget::fuel(host.fuel_max(), bytes.len());
        let live = match self.live.take() {
            Some(live) => Ok(live),
            None => Self::start(&self.policy, now_ms, silent).map(|(live, _)| live),
        };
        let mut call = Call {
            instance: self,
            host: None,
            failed: None,
            fuel,
            burnt: 0,
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

/// A call under way: `handle`, then any number of `notify`, all from one budget.
pub struct Call<'a, H: Host> {
    instance: &'a mut Instance<H>,
    /// The host, where there is no live instance to hold it.
    host: Option<H>,
    failed: Option<Failure>,
    /// What it may burn.
    fuel: u64,
    /// What it had burnt when its instance was thrown away.
    burnt: u64,
}

impl<H: Host> Call<'_, H> {
    /// Lets the policy decide.
    pub fn handle(&mut self, request: Request<'_>) -> Result<Outcome, Failure> {
        self.enter(|live| {
            let handler = live.bindings.statehouse_policy_handler();
            let outcome = handler.call_handle(&mut live.store, request)?;
            live.store
                .data_mut()
                .account
                .moved(outcome.reply.head.len())?;
            Ok(outcome)
        })
    }

    /// Lets the policy say how a change is told in a dialect. Spans of the notification mean its key.
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
            let said = handler.call_notify(&mut live.store, change, dialect)?;
            let topic = said.topic_prefix.len() + said.topic_suffix.len();
            let account = &mut live.store.data_mut().account;
            account.import(0)?;
            account.moved(topic + said.payload.head.len())?;
            Ok(said)
        })
    }

    /// What the host holds by now.
    pub fn host(&mut self) -> &mut H {
        let live = self.instance.live.as_mut();
        let held = live
            .and_then(|live| live.store.data_mut().host.as_mut())
            .or(self.host.as_mut());
        held.expect("begin put the host into one of the two places, and only end takes it out")
    }

    /// The fuel that it has burnt by now: the same on every machine.
    pub fn burnt(&self) -> u64 {
        match &self.instance.live {
            Some(live) => live.burnt(self.fuel),
            None => self.burnt,
        }
    }

    /// What the policy returned was no outcome: an instance that broke the contract once is replaced,
    /// as after a trap.
    pub fn discard(&mut self, failure: &Failure) {
        self.fail(failure.clone());
    }

    /// Ends the call and gives the host back.
    pub fn end(mut self) -> H {
        let live = self.instance.live.as_mut();
        let held = live.and_then(|live| {
            let data = live.store.data_mut();
            // A request must not stay in memory until the next one comes.
            data.bytes = Bytes::new();
            data.host.take()
        });
        held.or(self.host.take())
            .expect("begin put the host into one of the two places, and only this takes it out")
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
        let done = call(live).map_err(|error| Failure::of(&error));
        match done {
            // Neither account is used up, and both together are.
            Ok(_) if live.burnt(self.fuel) > self.fuel => Err(self.fail(Failure::Fuel)),
            done => done.map_err(|failure| self.fail(failure)),
        }
    }

    /// Throws the instance away, keeps the host.
    fn fail(&mut self, failure: Failure) -> Failure {
        self.burnt = self.burnt();
        if let Some(mut live) = self.instance.live.take() {
            self.host = live.store.data_mut().host.take();
        }
        self.failed = Some(failure.clone());
        failure
    }
}

/// The part of `bytes` that a span names.
pub(crate) fn slice(bytes: &Bytes, span: Span) -> Result<Bytes, Failure> {
    guest::slice(bytes, span)
        .ok_or_else(|| Failure::Malformed("a span outside the call's bytes".into()))
}
