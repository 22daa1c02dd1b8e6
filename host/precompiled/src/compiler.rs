//! Compiles components in a child process, which has limits of memory and time.
//!
//! Input: a policy's file, untrusted. Output: machine code, or the reason why there is none. The
//! file decides what its compilation costs: half a megabyte of calls takes a gigabyte. So the child
//! dies of it, and the store does not.
//!
//! The child is the same program, by way of `/proc/self/exe`, which stays what runs when the file
//! is replaced. It reads the policy from its standard input and writes one byte, which says what
//! follows, and then machine code or an error.

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

/// The first argument of a child. No command of the program has this name.
const CHILD: &str = "compile-policy-of-stdin";

/// What follows in a child's output.
const CODE: u8 = 0;
const NO_COMPONENT: u8 = 1;
const REFUSED: u8 = 2;

/// How often the parent looks whether its child has ended.
const POLL: Duration = Duration::from_millis(5);

/// By how much a child is nicer than the store: requests must not wait for a compilation.
const NICE: i32 = 10;

/// The compiler that this program uses, once [`Compiler::install`] was called.
static INSTALLED: OnceLock<Compiler> = OnceLock::new();

/// Held while a child runs, so that two cannot take the memory of two.
static ONE: Mutex<()> = Mutex::new(());

/// What one compilation may take.
#[derive(Clone, Copy, Debug)]
pub struct CompileBounds {
    /// Memory for any file, in bytes.
    pub memory_bytes: u64,
    /// Memory for each byte of the file, in bytes.
    pub memory_per_file_byte: u64,
    /// Memory at most, in bytes.
    pub memory_bytes_max: u64,
    /// Processor time of all threads together.
    pub cpu: Duration,
    /// Time until the child is killed.
    pub wall: Duration,
    /// Threads that compile: each holds what its function takes.
    pub threads_max: usize,
    /// Machine code, in bytes. The store reads it into its own memory.
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
    /// A core module that cannot be made a component.
    #[error("{0}")]
    NoComponent(String),
    /// The compiler refuses it.
    #[error("{0}")]
    Refused(String),
    /// It needs more than a policy may.
    #[error("compiling it takes more than {0}")]
    Exceeded(String),
    /// The compiler crashed: no machine code is worth another attempt in the store itself.
    #[error("the compiler crashed at it ({0})")]
    Crashed(ExitStatus),
    /// The machine cannot run the compiler.
    #[error("the compiler cannot be run: {0}")]
    Machine(String),
}

/// Runs a program as the compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    bounds: CompileBounds,
}

impl Compiler {
    /// `program` must call [`child`] before anything else.
    pub fn new(program: impl Into<PathBuf>, bounds: CompileBounds) -> Self {
        let program = program.into();
        Self { program, bounds }
    }

    /// This very program, also when its file was replaced since it started.
    pub fn this_program(bounds: CompileBounds) -> Self {
        Self::new("/proc/self/exe", bounds)
    }

    /// Lets every compilation of this process happen in a child from now on. A process that does
    /// not call it, such as a test that uses the library, compiles in its own process and without
    /// limits.
    pub fn install(self) {
        // The first one counts.
        let _ = INSTALLED.set(self);
    }

    /// The machine code of a policy's file.
    ///
    /// # Errors
    /// [`CompileError`].
    pub fn compile(&self, file: &[u8]) -> Result<Vec<u8>, CompileError> {
        // A poisoned lock only means that a thread died while it waited for its child.
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = self.bounds.memory_for(file.len());
        let mut child = self.spawn(memory).map_err(machine)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (ended, output) = thread::scope(|scope| {
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(file)));
            let output = scope.spawn(move || {
                let mut bytes = Vec::new();
                // With the first byte, and one that is too many.
                let max = self.bounds.code_bytes_max + 2;
                let read = stdout.map(|stdout| stdout.take(max).read_to_end(&mut bytes));
                read.transpose().map(|_| bytes)
            });
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

    /// What became of a child; none is the status of one that was killed for its time.
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
            // So ends a Rust program that gets no memory.
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

/// How a child ended; none if the parent killed it after `wall`.
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

/// The machine code of a policy's file for `engine`: from a child where a compiler is installed,
/// else from this process.
pub(crate) fn code(engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
    match INSTALLED.get() {
        Some(compiler) => compiler.compile(file),
        None => here(engine, file),
    }
}

/// Compiles in this process.
fn here(engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
    let encoded;
    // \0asm, then the version and the layer: 1 and 0 for a module, 13 and 1 for a component.
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

/// Makes a component of a core module, all of which has to be there.
///
/// # Errors
/// What is wrong with the module.
pub fn encode(module: &[u8]) -> anyhow::Result<Vec<u8>> {
    wit_component::ComponentEncoder::default()
        .module(module)?
        .validate(true)
        .encode()
}

/// Compiles, if this process was started to do that and nothing else. The program's `main` must
/// begin with this.
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

/// Takes the limits of a child, before it reads anything.
fn limit(memory: u64, cpu_seconds: u64) -> io::Result<()> {
    // These are good to have. The first ends the child with the store. By the second the kernel
    // takes memory from the child rather than from the store where a small machine has less than
    // the limit.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let _ = nice(NICE);
    for (resource, current, maximum) in [
        // Not the address space, of which threads reserve much more than they use.
        (Resource::Data, memory, memory),
        // The signal of the first says what it is for, that of the second does not.
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
