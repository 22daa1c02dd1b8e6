// Shows whether the store is ready. The probe needs no login.
const status = document.getElementById("ready");
try {
  const answer = await fetch("/readyz");
  const { error } = await answer.json();
  status.textContent = answer.ok ? "The store is ready." : `The store is not ready: ${error}`;
} catch (error) {
  status.textContent = `The store does not answer: ${error.message}`;
}
