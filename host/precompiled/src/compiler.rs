//! Compiles components in a child process with limits of memory and time.
//!
//! Input is the file of a policy, which is untrusted; output is machine code or an error. The file
//! determines the cost of its compilation: half a megabyte of calls takes a gigabyte. With a child
//! process, exceeding the limits ends the child and not the store.
//!
//! The child runs the same program through `/proc/self/exe`, which stays valid when the file of the
//! program is replaced. It reads the policy from standard input. It writes one byte for the kind of
//! the result, followed by machine code or an error text.

use std::env;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, nice, set_parent_process_death_signal, setrlimit};
use wasmtime::Engine;

/// The first argument of a child. It is not a command of the program.
const CHILD: &str = "compile-policy-of-stdin";

/// The first byte of a child's output: the kind of the result.
const CODE: u8 = 0;
const NO_COMPONENT: u8 = 1;
const REFUSED: u8 = 2;

/// How often the parent checks whether its child has ended.
const POLL: Duration = Duration::from_millis(5);

/// The niceness of a child, so that compilation does not delay requests.
const NICE: i32 = 10;

/// The compiler of this program, after [`Compiler::install`].
static INSTALLED: OnceLock<Compiler> = OnceLock::new();

/// Held while a child runs, so that two children never use twice the memory.
static ONE: Mutex<()> = Mutex::new(());

/// The limits of one compilation.
#[derive(Clone, Copy, Debug)]
pub struct CompileBounds {
    /// Memory for any file, in bytes.
    pub memory_bytes: u64,
    /// Additional memory for each byte of the file, in bytes.
    pub memory_per_file_byte: u64,
    /// Largest memory limit, in bytes.
    pub memory_bytes_max: u64,
    /// Processor time of all threads together.
    pub cpu: Duration,
    /// Time after which the child is killed.
    pub wall: Duration,
    /// Number of compiling threads. Each holds the memory of the function that it compiles.
    pub threads_max: usize,
    /// Largest machine code, in bytes. The store reads it into its own memory.
    pub code_bytes_max: u64,
}

impl CompileBounds {
    fn memory_for(&self, file_bytes: usize) -> u64 {
        let for_file = self.memory_per_file_byte.saturating_mul(file_bytes as u64);
        let memory = self.memory_bytes.saturating_add(for_file);
        memory.min(self.memory_bytes_max)
    }
}

/// Why there is no machine code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The core module cannot be converted to a component.
    #[error("{0}")]
    NoComponent(String),
    /// The compiler rejected the file.
    #[error("{0}")]
    Refused(String),
    /// The compilation exceeded a limit.
    #[error("compiling it takes more than {0}")]
    Exceeded(String),
    /// The compiler crashed, or the kernel killed it. Compiling the file in the store's process
    /// could crash the store.
    #[error("{}", crash(*.0))]
    Crashed(ExitStatus),
    /// The child process could not be run.
    #[error("the compiler cannot be run: {0}")]
    Machine(String),
}

fn crash(status: ExitStatus) -> String {
    match status.signal() {
        // Only the kernel kills a child that the parent still waits for: see [`limit`].
        Some(it) if it == Signal::KILL.as_raw() => {
            "the kernel killed the compiler, since compiling the policy takes more than the free memory of this machine: free memory, or make the policy smaller".to_owned()
        }
        _ => format!("the compiler crashed ({status})"),
    }
}

/// Runs a program as the compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    bounds: CompileBounds,
}

impl Compiler {
    /// `program` must call [`child`] at the start of its `main`.
    pub fn new(program: impl Into<PathBuf>, bounds: CompileBounds) -> Self {
        let program = program.into();
        Self { program, bounds }
    }

    /// Uses this program, even if its file was replaced since it started.
    pub fn this_program(bounds: CompileBounds) -> Self {
        Self::new("/proc/self/exe", bounds)
    }

    /// Makes every later compilation of this process run in a child. A process that does not call
    /// this, such as a test that uses the library, compiles in its own process without limits.
    pub fn install(self) {
        // Only the first call has an effect.
        let _ = INSTALLED.set(self);
    }

    /// Compiles the file of a policy.
    pub fn compile(&self, file: &[u8]) -> Result<Vec<u8>, CompileError> {
        // A poisoned lock only means that a thread panicked while it waited for its child.
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = self.bounds.memory_for(file.len());
        let mut child = self.spawn(memory).map_err(machine)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (ended, output) = thread::scope(|scope| {
            let write = move || stdin.map(|mut stdin| stdin.write_all(file));
            let read = move || {
                let mut bytes = Vec::new();
                // Includes the first byte, and one more byte to detect excess.
                let max = self.bounds.code_bytes_max + 2;
                let read = stdout.map(|stdout| stdout.take(max).read_to_end(&mut bytes));
                read.transpose().map(|_| bytes)
            };
            let started = (thread::Builder::new().spawn_scoped(scope, write))
                .and_then(|_| thread::Builder::new().spawn_scoped(scope, read));
            let output = match started {
                Ok(output) => output,
                Err(error) => {
                    // Ends the first thread. Report the first error.
                    let _ = child.kill().and_then(|()| child.wait());
                    return (Err(error), Ok(Vec::new()));
                }
            };
            let ended = wait(&mut child, self.bounds.wall);
            let output = output.join().unwrap_or_else(|_| Ok(Vec::new()));
            (ended, output)
        });
        let status = ended.map_err(machine)?;
        self.outcome(status, memory, output.map_err(machine)?)
    }

    fn spawn(&self, memory: u64) -> io::Result<Child> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(self.bounds.threads_max).max(1);
        Command::new(&self.program)
            .arg0("statehouse")
            .arg(CHILD)
            .arg(memory.to_string())
            .arg(self.bounds.cpu.as_secs().max(1).to_string())
            .env_clear()
            .env("RAYON_NUM_THREADS", threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
    }

    /// Evaluates a child. `status` is `None` if the child was killed after its time limit.
    fn outcome(
        &self,
        status: Option<ExitStatus>,
        memory: u64,
        mut output: Vec<u8>,
    ) -> Result<Vec<u8>, CompileError> {
        let exceeded = |what: String| Err(CompileError::Exceeded(what));
        let Some(status) = status else {
            return exceeded(format!("{:?}", self.bounds.wall));
        };
        if output.len() as u64 > self.bounds.code_bytes_max + 1 {
            let max = self.bounds.code_bytes_max;
            return exceeded(format!("{max} bytes of machine code"));
        }
        match status.signal() {
            Some(it) if it == Signal::XCPU.as_raw() => {
                let cpu = self.bounds.cpu;
                return exceeded(format!("{cpu:?} of processor time"));
            }
            // A Rust program aborts when memory allocation fails.
            Some(it) if it == Signal::ABORT.as_raw() => {
                return exceeded(format!("{memory} bytes of memory"));
            }
            _ => {}
        }
        if !status.success() || output.is_empty() {
            return Err(CompileError::Crashed(status));
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.remove(0) {
            CODE => Ok(output),
            NO_COMPONENT => Err(CompileError::NoComponent(text(&output))),
            REFUSED => Err(CompileError::Refused(text(&output))),
            _ => Err(CompileError::Crashed(status)),
        }
    }
}

/// Waits for a child. Returns `None` if it was killed after `wall`.
fn wait(child: &mut Child, wall: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + wall;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

fn machine(error: io::Error) -> CompileError {
    CompileError::Machine(error.to_string())
}

/// Compiles for `engine`: in a child if a compiler is installed, otherwise in this process.
pub(crate) fn code(engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
    match INSTALLED.get() {
        Some(compiler) => compiler.compile(file),
        None => here(engine, file),
    }
}

/// Compiles in this process.
fn here(engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
    let encoded;
    // The preamble is \0asm, the version and the layer: 1 and 0 for a module, 13 and 1 for a
    // component.
    let component = match file {
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => {
            encoded = encode(file).map_err(|e| CompileError::NoComponent(e.to_string()))?;
            &encoded[..]
        }
        _ => file,
    };
    let code = engine.precompile_component(component);
    code.map_err(|e| CompileError::Refused(e.root_cause().to_string()))
}

/// Converts a complete core module to a component.
pub fn encode(module: &[u8]) -> anyhow::Result<Vec<u8>> {
    wit_component::ComponentEncoder::default()
        .module(module)?
        .validate(true)
        .encode()
}

/// Compiles and returns the exit code if this process was started as a compiler. The program's
/// `main` must begin with this call.
pub fn child() -> Option<ExitCode> {
    let mut arguments = env::args().skip(1);
    if arguments.next()? != CHILD {
        return None;
    }
    let mut number = || arguments.next()?.parse().ok();
    let (memory, cpu) = (number()?, number()?);
    let done = limit(memory, cpu).and_then(|()| compile_stdin());
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

/// Sets the limits of a child before it reads any input.
fn limit(memory: u64, cpu_seconds: u64) -> io::Result<()> {
    // Failures are ignored here. The first setting ends the child with the store. The second makes
    // the kernel kill the child rather than the store if a small machine has less memory than the
    // limit.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let _ = nice(NICE);
    for (resource, current, maximum) in [
        // The address space is not limited, because threads reserve much more of it than they use.
        (Resource::Data, memory, memory),
        // The signal of the soft limit names the cause, that of the hard limit does not.
        (Resource::Cpu, cpu_seconds, cpu_seconds.saturating_add(1)),
        (Resource::Core, 0, 0),
        (Resource::Fsize, 0, 0),
    ] {
        let limit = Rlimit {
            current: Some(current),
            maximum: Some(maximum),
        };
        setrlimit(resource, limit)?;
    }
    Ok(())
}

fn compile_stdin() -> io::Result<()> {
    let mut file = Vec::new();
    io::stdin().lock().read_to_end(&mut file)?;
    let engine = Engine::new(&crate::config()).map_err(io::Error::other)?;
    let (kind, bytes) = match here(&engine, &file) {
        Ok(code) => (CODE, code),
        Err(CompileError::NoComponent(text)) => (NO_COMPONENT, text.into_bytes()),
        Err(error) => (REFUSED, error.to_string().into_bytes()),
    };
    let mut out = io::stdout().lock();
    out.write_all(&[kind])?;
    out.write_all(&bytes)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: it counted as a limit that the policy exceeds, so a later start did not try.
    #[test]
    fn killed_compiler_has_crashed() {
        let bounds = CompileBounds {
            memory_bytes: 0,
            memory_per_file_byte: 0,
            memory_bytes_max: 0,
            cpu: Duration::ZERO,
            wall: Duration::ZERO,
            threads_max: 1,
            code_bytes_max: 0,
        };
        let killed = ExitStatus::from_raw(Signal::KILL.as_raw());
        let outcome = Compiler::this_program(bounds).outcome(Some(killed), 0, Vec::new());
        let error = outcome.unwrap_err();
        assert_eq!(error, CompileError::Crashed(killed));
        assert!(error.to_string().contains("free memory"), "{error}");
    }
}
