(* T5 as an equivalence on iterates: outside 0 < eta lam < 2 (1 + beta)/(1 - beta) some run does not go to 0. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum MomentumStability MomentumDecay UncoupledLimit.
Open Scope R_scope.

(* a real root of modulus at least 1, when the trace leaves (-(1 + d), 1 + d) *)
Lemma large_root s d : 0 <= d < 1 -> (1 + d <= s \/ s <= - (1 + d)) ->
  exists r, r ^ 2 - s * r + d = 0 /\ 1 <= Rabs r.
Proof.
  intros Hd H. assert (D : (1 - d) ^ 2 <= s ^ 2 - 4 * d) by (destruct H; nra).
  assert (P : 0 <= s ^ 2 - 4 * d) by (pose proof (pow2_ge_0 (1 - d)); lra).
  pose proof (pow2_sqrt _ P) as R2.
  assert (R1 : 1 - d <= sqrt (s ^ 2 - 4 * d)).
  { rewrite <- (sqrt_pow2 (1 - d)) by lra. apply sqrt_le_1_alt. exact D. }
  set (w := sqrt (s ^ 2 - 4 * d)) in *. destruct H as [H|H].
  - exists ((s + w) / 2). split; [nra|]. rewrite Rabs_pos_eq; lra.
  - exists ((s - w) / 2). split; [nra|]. rewrite Rabs_left; lra.
Qed.

Lemma powers_stay r : 1 <= Rabs r -> ~ is_lim_seq (fun t => r ^ t) 0.
Proof.
  intros Hr H. apply is_lim_seq_abs_0 in H.
  assert (L : Rbar_le 1 0).
  { apply (is_lim_seq_le (fun _ => 1) (fun t => Rabs (r ^ t)) 1 0); [|apply is_lim_seq_const|exact H].
    intros t. rewrite <- RPow_abs. rewrite <- (pow1 t) at 1. apply pow_incr. lra. }
  simpl in L. lra.
Qed.

Theorem ema_limit : forall eta beta lam, 0 <= beta < 1 ->
  ((forall x m, ema_run x m eta beta lam -> is_lim_seq x 0) <-> 0 < eta * lam < 2 * (1 + beta) / (1 - beta)).
Proof.
  intros eta beta lam Hb. split; [|intros H x m; apply ema_decays; assumption].
  intros All. assert (E : 2 * (1 + beta) / (1 - beta) * (1 - beta) = 2 * (1 + beta)) by (field; lra).
  set (B := 2 * (1 + beta) / (1 - beta)) in *.
  destruct (Rlt_le_dec 0 (eta * lam)) as [H0|H0]; [destruct (Rlt_le_dec (eta * lam) B) as [H1|H1]; [lra|]|];
    exfalso; (destruct (Req_dec eta 0) as [Z|Z];
      [rewrite Z in *; apply (powers_stay 1); [rewrite Rabs_R1; lra|];
       apply is_lim_seq_ext with (fun _ => 1); [intros; symmetry; apply pow1|];
       apply (All (fun _ => 1) (fun t => lam * (1 - beta ^ t))); intros t; split; simpl; ring|]).
  - destruct (large_root (tr beta eta lam) beta Hb) as [r [Hr R1]]; [right; unfold tr; nra|].
    assert (r <> 0) by (intros ->; rewrite Rabs_R0 in R1; lra).
    apply (powers_stay r R1). apply (All (fun t => r ^ t) (fun t => r ^ t * (1 / r - 1) / eta)).
    intros t. split; simpl.
    + apply Rminus_diag_uniq. replace (r * r ^ t * (1 / r - 1) / eta
        - (beta * (r ^ t * (1 / r - 1) / eta) + (1 - beta) * (lam * r ^ t)))
        with (- (r ^ t / (r * eta)) * (r ^ 2 - tr beta eta lam * r + beta)) by (unfold tr; field; split; assumption).
      rewrite Hr. ring.
    + field. split; assumption.
  - destruct (large_root (tr beta eta lam) beta Hb) as [r [Hr R1]]; [left; unfold tr; nra|].
    assert (r <> 0) by (intros ->; rewrite Rabs_R0 in R1; lra).
    apply (powers_stay r R1). apply (All (fun t => r ^ t) (fun t => r ^ t * (1 / r - 1) / eta)).
    intros t. split; simpl.
    + apply Rminus_diag_uniq. replace (r * r ^ t * (1 / r - 1) / eta
        - (beta * (r ^ t * (1 / r - 1) / eta) + (1 - beta) * (lam * r ^ t)))
        with (- (r ^ t / (r * eta)) * (r ^ 2 - tr beta eta lam * r + beta)) by (unfold tr; field; split; assumption).
      rewrite Hr. ring.
    + field. split; assumption.
Qed.

(* an uncoupled block under idle momentum, seen at the starts of its cycles *)
Theorem uncoupled_decays : forall x m eta beta lam p, (0 < p)%nat -> 0 <= beta < 1 ->
  0 < eta * lam < 2 * (1 + beta ^ p) / (1 - beta ^ p) -> visited_block x m eta beta lam p ->
  is_lim_seq (fun k => x (k * p)%nat) 0.
Proof.
  intros x m eta beta lam p Hp Hb He H. pose proof (power_below_one beta p Hb Hp) as Q.
  apply (jury_decay _ (tr (beta ^ p) eta lam) (beta ^ p)); [lra|apply jury_interval; assumption|].
  intros k. destruct (cycle_is_ema x m eta beta lam p Hp Hb H k) as [X N].
  destruct (cycle_is_ema x m eta beta lam p Hp Hb H (S k)) as [X' _]. rewrite X', N. unfold tr.
  replace (eta * (beta ^ p * cycle_momentum m beta p k + (1 - beta ^ p) * (lam * x (S k * p)%nat)))
    with (beta ^ p * (eta * cycle_momentum m beta p k) + eta * (1 - beta ^ p) * lam * x (S k * p)%nat) by ring.
  replace (eta * cycle_momentum m beta p k) with (x (k * p)%nat - x (S k * p)%nat) by lra. ring.
Qed.
